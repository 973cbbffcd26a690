"""Makes tests/golden/data/*.golden: tiny models of Hugging Face transformers, run in float64.

    make_goldens.py           writes every file and prints its size and PyTorch's own errors
    make_goldens.py --check   recomputes every file and compares it with the committed one

README.md beside this file says what a golden file holds.
"""

import argparse
import contextlib
import math
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import golden_format
import plain_llama

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
IGNORED = -100
ROPE_POSITIONS = [0, 1, 2, 39, 1000, 8191, 131071, 1048575, 5000000]
TRAINING = {
    "steps": 20,
    "warmup_steps": 4,
    "peak_lr": 0.01,
    "min_lr": 0.001,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "clip_eps": 1e-6,
    "lr_formula": "step <= warmup: peak * step / warmup; else min_lr + 0.5 * (peak - min_lr) * "
    "(1 + cos(pi * (step - warmup) / (steps - warmup))); step = 1 .. steps",
    "clip_formula": "gradients *= min(1, clip_norm / (norm + clip_eps))",
    "decay_rule": "weight_decay on tensors of two or more dims, 0 on norm weights and biases",
}
BASE = {
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "qk_norm": False,
    "qkv_bias": False, "tied_embeddings": False,
}  # fmt: skip
TINY = BASE | {
    "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 12,
    "intermediate_size": 56, "vocab_size": 61, "context_tokens": 24,
}  # fmt: skip
LLAMA3_ROPE = BASE | {
    "layers": 3, "hidden_size": 24, "heads": 6, "kv_heads": 3, "head_dim": 16,
    "intermediate_size": 40, "vocab_size": 67, "context_tokens": 40, "tied_embeddings": True,
    "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_context": 32},
}  # fmt: skip
MULTI_QUERY = BASE | {
    "layers": 1, "hidden_size": 40, "heads": 5, "kv_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 53, "context_tokens": 17,
}  # fmt: skip
QWEN3 = BASE | {
    "layers": 2, "hidden_size": 32, "heads": 6, "kv_heads": 3, "head_dim": 16,
    "intermediate_size": 40, "vocab_size": 59, "context_tokens": 27,
    "rms_norm_eps": 0.01, "rope_theta": 1e6, "qk_norm": True,
}  # fmt: skip
QWEN2_5 = BASE | {
    "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8,
    "intermediate_size": 44, "vocab_size": 57, "context_tokens": 45, "tied_embeddings": True,
    "rms_norm_eps": 1e-6, "qkv_bias": True,
    "rope_theta": 50.0,  # a pair that hardly turns has a k bias gradient of nothing but rounding
}  # fmt: skip
SCALED = BASE | {
    "layers": 2, "hidden_size": 20, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "intermediate_size": 28, "vocab_size": 41, "context_tokens": 48, "tied_embeddings": True,
}  # fmt: skip
LINEAR = {"type": "linear", "factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 3.0, "original_context": 20}
YARN = {"type": "yarn", "factor": 8.0, "original_context": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": None, "truncate": True}  # fmt: skip
YARN_EXPLICIT = YARN | {"factor": 4.0, "original_context": 40, "beta_fast": 4.0, "beta_slow": 0.5,
                        "attention_factor": 1.4, "truncate": False}  # fmt: skip
# name -> (seed, size of the final norm's weights, are some labels ignored, config). The size makes
# the gradient norm cross clip_norm both ways while training.
CASES = {
    "tiny": (1, 0.7, False, TINY),
    "llama3_rope": (2, 0.09, False, LLAMA3_ROPE),
    "multi_query": (3, 0.4, True, MULTI_QUERY),
    "qwen3": (4, 0.65, False, QWEN3),
    "qwen2_5": (5, 0.1, True, QWEN2_5),
    "linear_rope": (6, 0.15, False, SCALED | {"rope_scaling": LINEAR}),
    "dynamic_rope": (7, 0.15, False, SCALED | {"rope_scaling": DYNAMIC}),
    "yarn_rope": (8, 0.15, False, SCALED | {"rope_scaling": YARN}),
    "qwen3_yarn": (9, 0.15, False, SCALED | {"rope_scaling": YARN_EXPLICIT, "qk_norm": True}),
}


@contextlib.contextmanager
def float32_is_float64():
    """transformers casts to float32 inside RMSNorm and the rotary embedding; here it cannot."""
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.multiple(torch, float=torch.float64, float32=torch.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def rope_parameters(config):
    parameters = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    for key, value in (config["rope_scaling"] or {}).items():
        names = {"type": "rope_type", "original_context": "original_max_position_embeddings"}
        if value is not None:
            parameters[names.get(key, key)] = value
    return parameters


def make_model(config):
    """A float32 model as transformers makes it. Frequencies stay as they are made."""
    family = "Qwen3" if config["qk_norm"] else "Qwen2" if config["qkv_bias"] else "Llama"
    rope, max_position = rope_parameters(config), 8 * config["context_tokens"]
    if rope["rope_type"] == "dynamic":  # takes this for the original context
        max_position = rope.pop("original_max_position_embeddings")
    elif rope["rope_type"] == "yarn":
        max_position = int(rope["factor"] * rope["original_max_position_embeddings"])
    hf_config = getattr(transformers, family + "Config")(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"],
        num_key_value_heads=config["kv_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=max_position,
        tie_word_embeddings=config["tied_embeddings"],
        rope_parameters=rope,
        attn_implementation="sdpa",  # the eager one casts its softmax to float32
    )
    return getattr(transformers, family + "ForCausalLM")(hf_config)


def make_exact_angle_model(config, dtype):
    """The model with parameters of `dtype` and float64 angles, whose sin and cos are rounded."""
    with float32_is_float64():
        model = make_model(config)
    rotary = model.model.rotary_emb
    rotate = rotary.forward

    def forward(x, position_ids):
        with float32_is_float64():
            return rotate(x, position_ids)

    rotary.forward = forward
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def random_weights(model, final_norm, rng):
    """Every parameter as float32. Large query and key weights: attention is far from uniform."""
    weights = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith(".bias"):
            values = 0.5 * rng.standard_normal(shape)
        elif parameter.dim() == 1:
            values = 1 + 0.25 * rng.standard_normal(shape)
            values *= final_norm if name == "model.norm.weight" else 1.0
        elif "embed_tokens" in name:
            values = rng.standard_normal(shape)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 0.6
            values = gain / math.sqrt(shape[1]) * rng.standard_normal(shape)
        weights[name] = torch.from_numpy(values.astype(np.float32))
    return weights


def random_batch(config, some_ignored, rng, rows):
    """(tokens, labels) [rows, tokens]: labels are the next tokens; one in four is pure chance."""
    length, vocab = config["context_tokens"], config["vocab_size"]
    stream = rng.integers(0, vocab, (rows, length + 1))
    for i in range(1, length + 1):
        follow = rng.random(rows) < 0.75
        stream[follow, i] = (3 * stream[follow, i - 1] + 1) % vocab
    tokens, labels = stream[:, :-1].copy(), stream[:, 1:].copy()
    if some_ignored:
        for row in range(rows):
            labels[row, length - 3 - row % 5 :] = IGNORED
            labels[row, rng.integers(0, 5)] = IGNORED
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def forward_backward(model, tokens, labels):
    """(loss, logits [tokens, vocab]); the gradients of the mean loss are left in the parameters."""
    model.zero_grad()
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    loss = F.cross_entropy(wide, labels, ignore_index=IGNORED)
    loss.backward()
    return loss, logits


def train(model, masters, train_batch):
    """Clipped AdamW on `masters` {name: tensor}, which are copied into the model before each step
    and end as the trained weights. Returns (losses, norms, learning rates)."""
    t = TRAINING
    decayed = [w for w in masters.values() if w.dim() >= 2]
    others = [w for w in masters.values() if w.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": t["weight_decay"]},
         {"params": others, "weight_decay": 0.0}],
        betas=(t["beta1"], t["beta2"]), eps=t["eps"],
    )  # fmt: skip
    losses, norms, rates = [], [], []
    for step in range(1, t["steps"] + 1):
        load(model, masters)
        loss, _ = forward_backward(model, train_batch[0][step - 1], train_batch[1][step - 1])
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.to(masters[name].dtype, copy=True)
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), t["clip_norm"]))
        rates.append(plain_llama.learning_rate(t, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
        losses.append(loss)
    return losses, norms, rates


def load(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def run(config, weights, batch, train_batch, dtype):
    """Everything a golden file holds beyond the inputs, computed in `dtype`, as float64 arrays. In
    bfloat16 the master weights and moments are float32."""

    def numpy_of(values):
        return torch.as_tensor(values).detach().double().numpy().copy()

    model = make_exact_angle_model(config, dtype)
    load(model, weights)
    loss, logits = forward_backward(model, *batch)
    result = {"loss": numpy_of(loss[None]), "logits": numpy_of(logits)}
    result |= {f"grad/{name}": numpy_of(p.grad) for name, p in model.named_parameters()}
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    masters = {name: w.to(wide, copy=True).requires_grad_() for name, w in weights.items()}
    losses, norms, rates = train(model, masters, train_batch)
    result |= {
        "train/losses": numpy_of(torch.stack(losses)),
        "train/grad_norms": numpy_of(torch.stack(norms)),
        "train/learning_rates": numpy_of(rates),
    }
    for name, master in masters.items():
        result[f"train/delta/{name}"] = numpy_of(master.double() - weights[name].double())
    return result


def rope_tables(config):
    """Inverse frequencies [head_dim / 2], cos and sin [ROPE_POSITIONS, head_dim / 2] with float64
    angles (rope/) and as transformers rounds them (rope_hf_parity/). Far positions too: the two
    hardly differ within context_tokens, but do at 5,000,000."""
    tables = {"rope/positions": np.array(ROPE_POSITIONS, np.int32)}
    half = config["head_dim"] // 2

    def add(kind):
        rotary = make_model(config).model.rotary_emb
        x = torch.zeros(1, dtype=torch.float64)
        rotary(x, torch.arange(config["context_tokens"])[None])  # "dynamic" reads the length here
        rotate = type(rotary).forward.__wrapped__  # and must not read it from the far positions
        cos, sin = rotate(rotary, x, torch.tensor([ROPE_POSITIONS]))
        tables[f"{kind}/inverse_frequencies"] = rotary.inv_freq.double().numpy()
        tables[f"{kind}/cos"] = cos[0, :, :half].numpy()
        tables[f"{kind}/sin"] = sin[0, :, :half].numpy()

    add("rope_hf_parity")
    with float32_is_float64():
        add("rope")
    return tables


def relative_error(value, reference):
    return float(np.linalg.norm(value - reference) / max(np.linalg.norm(reference), 1e-300))


def require(condition, message):
    if not condition:
        sys.exit(f"make_goldens.py: {message}")


def check_against_plain(name, config, weights, batch, train_batch, exact, rope):
    """Refuses values that plain_llama.py does not reproduce to float64 rounding."""
    loss, gradients = plain_llama.gradients(weights, config, *batch)
    pairs = {"loss": np.array([loss])}
    pairs |= {f"grad/{key}": gradient.numpy() for key, gradient in gradients.items()}
    losses, norms, final = plain_llama.train(weights, config, TRAINING, *train_batch)
    pairs |= {"train/losses": np.array(losses), "train/grad_norms": np.array(norms)}
    pairs |= {f"train/delta/{key}": (w - weights[key].double()).numpy() for key, w in final.items()}
    pairs["rope/inverse_frequencies"] = plain_llama.inverse_frequencies(config).numpy()
    pairs["rope/cos"] = plain_llama.magnitude(config) * np.cos(
        np.outer(rope["rope/positions"], rope["rope/inverse_frequencies"])
    )
    worst = max((relative_error(value, (exact | rope)[key]), key) for key, value in pairs.items())
    require(worst[0] <= 1e-9, f"{name}: plain_llama.py differs by {worst[0]:.2e} in {worst[1]}")
    rounded, wide = (rope[f"{k}/inverse_frequencies"] for k in ("rope_hf_parity", "rope"))
    apart = relative_error(rounded, wide)
    require(apart <= 1e-6, f"{name}: float32 frequencies are {apart:.2e} from the float64 ones")
    return worst


def misreadings(config, weights):
    """{what an engine might get wrong: (config, weights) that say it}."""
    scaling = config["rope_scaling"]

    def scaled(**changes):
        return config | {"rope_scaling": scaling | changes}, weights

    def rewritten(ending, value):
        changed = {k: torch.full_like(w, value) for k, w in weights.items() if k.endswith(ending)}
        require(changed, f"no parameter ends in {ending}")
        return config, weights | changed

    wrong = {}
    if config["rms_norm_eps"] >= 0.01:  # smaller ones hardly show
        wrong["eps"] = config | {"rms_norm_eps": 1e-5}, weights
    if scaling:
        wrong["no scaling"] = config | {"rope_scaling": None}, weights
        wrong["factor"] = scaled(factor=scaling["factor"] + 1)
        if "original_context" in scaling:
            wrong["original context"] = scaled(original_context=scaling["original_context"] // 4)
        if scaling["type"] == "llama3":
            wrong["low_freq_factor"] = scaled(low_freq_factor=0.5 * scaling["low_freq_factor"])
            wrong["high_freq_factor"] = scaled(high_freq_factor=2 * scaling["high_freq_factor"])
        if scaling["type"] == "yarn":
            wrong["magnitude"] = scaled(attention_factor=1.0)
            wrong["truncate"] = scaled(truncate=not scaling["truncate"])
            wrong["beta_fast"] = scaled(beta_fast=8 * scaling["beta_fast"])
            wrong["beta_slow"] = scaled(beta_slow=scaling["beta_slow"] / 8)
    if config["qk_norm"]:
        wrong["q norm weights"] = rewritten("q_norm.weight", 1.0)
        wrong["k norm weights"] = rewritten("k_norm.weight", 1.0)
        wrong["no q/k norm"] = config | {"qk_norm": False}, weights
    if config["qkv_bias"]:
        wrong |= {f"{kind} bias": rewritten(f"{kind}_proj.bias", 0.0) for kind in "qkv"}
    return wrong


def check_is_telling(name, config, weights, batch, exact):
    """Refuses a case that would leave something untested."""
    clipped = int((exact["train/grad_norms"] > TRAINING["clip_norm"]).sum())
    require(0 < clipped < TRAINING["steps"], f"{name}: clipping acts in {clipped} of the steps")
    require(exact["train/losses"][-1] < exact["train/losses"][0], f"{name}: the loss does not fall")
    scaling = config["rope_scaling"] or {}
    if scaling.get("type") == "llama3":
        unscaled = plain_llama.inverse_frequencies(config | {"rope_scaling": None})
        turns = scaling["original_context"] * unscaled / (2 * torch.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        bands = [(turns > high).sum(), (turns < low).sum()]
        bands = [int(count) for count in (*bands, len(turns) - sum(bands))]
        require(all(bands), f"{name}: llama3 bands high, low, medium hold {bands} frequencies")
    if scaling.get("type") == "yarn":
        blend = plain_llama.yarn_blend(config)
        bands = [int(((blend > low) & (blend < high)).sum()) for low, high in ((-1, 1e-9), (0, 1))]
        require(all(bands) and blend[0] == 1, f"{name}: yarn scales {bands} frequencies, {blend}")
    least = math.inf, "nothing to misread"
    for what, (wrong_config, wrong_weights) in misreadings(config, weights).items():
        _, gradients = plain_llama.gradients(wrong_weights, wrong_config, *batch)
        seen = max(relative_error(g.numpy(), exact[f"grad/{key}"]) for key, g in gradients.items())
        least = min(least, (seen, what))
    require(least[0] >= 1e-3, f"{name}: {least[1]} changes every gradient by only {least[0]:.1e}")
    return clipped, least


def make_case(name):
    """(header, tensors) of one golden file."""
    seed, final_norm, some_ignored, config = CASES[name]
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = random_weights(make_model(config), final_norm, rng)
    tokens, labels = random_batch(config, some_ignored, rng, 1 + TRAINING["steps"])
    batch, train_batch = (tokens[0], labels[0]), (tokens[1:], labels[1:])
    inputs = (config, weights, batch, train_batch)
    naive = {"fp32": run(*inputs, torch.float32), "bf16": run(*inputs, torch.bfloat16)}
    rope = rope_tables(config)
    with float32_is_float64():
        exact = run(*inputs, torch.float64)
    worst = check_against_plain(name, *inputs, exact, rope)
    clipped, least = check_is_telling(name, config, weights, batch, exact)
    errors = {
        dtype: {key: float(f"{relative_error(values[key], exact[key]):.3g}")
                for key in exact if key != "train/learning_rates"}
        for dtype, values in naive.items()
    }  # fmt: skip
    print(f"{name}: loss {exact['loss'][0]:.4f}, training {exact['train/losses'][0]:.4f} to "
          f"{exact['train/losses'][-1]:.4f}, clipped {clipped} of {TRAINING['steps']} steps; "
          f"least telling: {least[1]} ({least[0]:.1e}); "
          f"plain_llama.py within {worst[0]:.1e} ({worst[1]})")  # fmt: skip
    header = {
        "name": name,
        "config": config,
        "training": TRAINING,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "pytorch_errors": errors,
    }
    tensors = {f"weight/{key}": w.numpy() for key, w in weights.items()}
    tensors |= {
        "tokens": batch[0].numpy().astype(np.int32),
        "labels": batch[1].numpy().astype(np.int32),
        "train/tokens": train_batch[0].numpy().astype(np.int32),
        "train/labels": train_batch[1].numpy().astype(np.int32),
    } | rope
    for key, value in exact.items():
        large = key == "logits" or key.startswith(("grad/", "train/delta/"))
        tensors[key] = value.astype(np.float32) if large else value
    return header, tensors


def check_committed(name, header, tensors):
    old_header, old_tensors = golden_format.read(DATA / f"{name}.golden")
    for key in ("config", "training"):
        require(header[key] == old_header[key], f"{name}: {key} differs from the committed file")
    require(tensors.keys() == old_tensors.keys(), f"{name}: the committed file has other tensors")
    differences = ((relative_error(t, old_tensors[key]), key) for key, t in tensors.items())
    worst = max(differences)
    require(worst[0] <= 1e-6, f"{name}: {worst[1]} is {worst[0]:.2e} away from the committed one")
    print(f"{name}: equals the committed file within {worst[0]:.1e} ({worst[1]})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in CASES:
        header, tensors = make_case(name)
        if arguments.check:
            check_committed(name, header, tensors)
            continue
        path = DATA / f"{name}.golden"
        golden_format.write(path, header, tensors)
        print(f"  {path.name}: {path.stat().st_size} bytes; PyTorch's float32 and bfloat16 errors:")
        for key, error in header["pytorch_errors"]["fp32"].items():
            print(f"    {error:.2e}  {header['pytorch_errors']['bf16'][key]:.2e}  {key}")


if __name__ == "__main__":
    main()
