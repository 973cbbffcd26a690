"""The job both sides train, as a dictionary with every field that either of them uses."""

MODEL = {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "rms_norm_eps": 1e-5,
    "init_stddev": 0.02,
    "rope": {"theta": 500000.0},
}
OPTIMIZER = {
    "learning_rate": 3e-4,
    "min_learning_rate": 3e-5,
    "warmup_steps": 0,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
HEADS_PER_STAGE = 4


def make_job(data, number, ranks, threads, context, steps, dtype):
    return {
        "name": f"bench-peer-{number:03}",
        "model": MODEL,
        "data": {"path": data},
        "parallel": {
            "ranks": ranks,
            "method": "upipe",
            "heads_per_stage": HEADS_PER_STAGE,
            "threads_per_rank": threads,
        },
        "optimizer": OPTIMIZER,
        # Within far less memory than the peer takes; the peer's checkpointing has no such choice.
        "memory": {"attention_output": "device"},
        "train": {"context": context, "steps": steps, "seed": 1, "eval_sequences": 0, "dtype": dtype},
    }


def to_yaml(fields, indent=0):
    lines = []
    for name, value in fields.items():
        nested = isinstance(value, dict)
        lines.append(" " * indent + name + ":" + ("" if nested else f" {value}"))
        lines += [to_yaml(value, indent + 2)] if nested else []
    return "\n".join(lines)
