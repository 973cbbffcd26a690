"""Makes tests/golden/data/*.golden: tiny Llamas of Hugging Face transformers, run in float64.

    make_goldens.py           writes every file and prints its size and PyTorch's own fp32 errors
    make_goldens.py --check   recomputes every file and compares it with the committed one

README.md beside this file says what a golden file holds.
"""

import argparse
import math
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama

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
    "decay_rule": "weight_decay on tensors of two or more dims, 0 on norm weights",
}
BASE = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_llama3": None, "hf_parity": False}
TINY = BASE | {
    "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 12,
    "intermediate_size": 56, "vocab_size": 61, "context_tokens": 24, "tied_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = BASE | {
    "layers": 3, "hidden_size": 24, "heads": 6, "kv_heads": 3, "head_dim": 16,
    "intermediate_size": 40, "vocab_size": 67, "context_tokens": 40, "tied_embeddings": True,
    "rope_llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_context": 32},
}  # fmt: skip
MULTI_QUERY = BASE | {
    "layers": 1, "hidden_size": 40, "heads": 5, "kv_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 53, "context_tokens": 17, "tied_embeddings": False,
}  # fmt: skip
# name -> (seed, size of the final norm's weights, are some labels ignored, config). The size makes
# the gradient norm cross clip_norm both ways while training. Equal seeds: equal weights and tokens.
CASES = {
    "tiny": (1, 0.7, False, TINY),
    "llama3_rope": (2, 0.09, False, LLAMA3_ROPE),
    "llama3_rope_hf_parity": (2, 0.09, False, LLAMA3_ROPE | {"hf_parity": True}),
    "multi_query": (3, 0.4, True, MULTI_QUERY),
}


def rms_norm_in_input_dtype(self, x):
    """LlamaRMSNorm without its cast to float32."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def exact_inverse_frequencies(hf_config):
    """[head_dim / 2] in float64, scaled as transformers' rope type llama3 says."""
    rope = hf_config.rope_parameters
    exponents = torch.arange(0, hf_config.head_dim, 2).double() / hf_config.head_dim
    frequencies = rope["rope_theta"] ** -exponents
    if rope["rope_type"] == "default":
        return frequencies
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * torch.pi / frequencies
    smooth = (length / wavelength - low) / (high - low)
    medium = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > length / low, frequencies / factor, medium)
    return torch.where(wavelength < length / high, frequencies, scaled)


def rotary_with_exact_angles(self, x, position_ids):
    """LlamaRotaryEmbedding.forward with frequencies and angles in float64."""
    theta = position_ids[..., None].double() * exact_inverse_frequencies(self.config)
    theta = torch.cat((theta, theta), dim=-1)
    return theta.cos().to(x.dtype), theta.sin().to(x.dtype)


def make_model(config):
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if scaling := config["rope_llama3"]:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_context"],
        }
    hf_config = transformers.LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"],
        num_key_value_heads=config["kv_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=8 * config["context_tokens"],
        tie_word_embeddings=config["tied_embeddings"],
        rope_parameters=rope,
        attn_implementation="sdpa",  # the eager one casts its softmax to float32
    )
    return transformers.LlamaForCausalLM(hf_config)


def random_weights(model, final_norm, rng):
    """Every parameter as float32. Large query and key weights: attention is far from uniform."""
    weights = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if parameter.dim() == 1:
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
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED)
    loss.backward()
    return loss, logits


def run(config, weights, batch, train_batch, dtype):
    """Everything a golden file holds beyond the inputs, computed in `dtype`, as float64 arrays."""
    model = make_model(config).to(dtype)
    parameters = dict(model.named_parameters())

    def numpy_of(values):
        return torch.as_tensor(values).detach().double().numpy().copy()

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    loss, logits = forward_backward(model, *batch)
    result = {"loss": numpy_of(loss[None]), "logits": numpy_of(logits)}
    result |= {f"grad/{name}": numpy_of(p.grad) for name, p in parameters.items()}
    t = TRAINING
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": t["weight_decay"]},
         {"params": others, "weight_decay": 0.0}],
        betas=(t["beta1"], t["beta2"]), eps=t["eps"],
    )  # fmt: skip
    losses, norms, rates = [], [], []
    for step in range(1, t["steps"] + 1):
        loss, _ = forward_backward(model, train_batch[0][step - 1], train_batch[1][step - 1])
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), t["clip_norm"]))
        rates.append(plain_llama.learning_rate(t, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
        losses.append(loss)
    result |= {
        "train/losses": numpy_of(torch.stack(losses)),
        "train/grad_norms": numpy_of(torch.stack(norms)),
        "train/learning_rates": numpy_of(rates),
    }
    for name, parameter in parameters.items():
        result[f"train/delta/{name}"] = numpy_of(parameter.double() - weights[name].double())
    return result


def rope_tables(config):
    """cos and sin [ROPE_POSITIONS, head_dim / 2] of the model's own rotary embedding. Far positions
    too: float32 and float64 angles hardly differ within context_tokens, but do at 5,000,000."""
    rotary = make_model(config).model.rotary_emb
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.tensor([ROPE_POSITIONS]))
    half = config["head_dim"] // 2
    frequencies = exact_inverse_frequencies(rotary.config)
    if config["hf_parity"]:
        frequencies = rotary.inv_freq.double()
    return {
        "rope/positions": np.array(ROPE_POSITIONS, np.int32),
        "rope/inverse_frequencies": frequencies.numpy(),
        "rope/cos": cos[0, :, :half].numpy(),
        "rope/sin": sin[0, :, :half].numpy(),
    }


def relative_error(value, reference):
    return float(np.linalg.norm(value - reference) / max(np.linalg.norm(reference), 1e-300))


def require(condition, message):
    if not condition:
        sys.exit(f"make_goldens.py: {message}")


def check_against_plain(name, config, weights, batch, train_batch, exact):
    """Refuses values that plain_llama.py does not reproduce to float64 rounding."""
    leaves = {key: w.double().requires_grad_() for key, w in weights.items()}
    loss = plain_llama.loss(leaves, config, *batch)
    loss.backward()
    pairs = {"loss": np.array([loss.item()])}
    pairs |= {f"grad/{key}": leaf.grad.numpy() for key, leaf in leaves.items()}
    start = {key: w.double() for key, w in weights.items()}
    losses, norms, final = plain_llama.train(start, config, TRAINING, *train_batch)
    pairs |= {"train/losses": np.array(losses), "train/grad_norms": np.array(norms)}
    pairs |= {f"train/delta/{key}": (w - start[key]).numpy() for key, w in final.items()}
    worst = max((relative_error(value, exact[key]), key) for key, value in pairs.items())
    require(worst[0] <= 1e-9, f"{name}: plain_llama.py differs by {worst[0]:.2e} in {worst[1]}")
    return worst


def check_is_telling(name, config, exact):
    """Refuses a case that would leave something untested."""
    clipped = int((exact["train/grad_norms"] > TRAINING["clip_norm"]).sum())
    require(0 < clipped < TRAINING["steps"], f"{name}: clipping acts in {clipped} of the steps")
    require(exact["train/losses"][-1] < exact["train/losses"][0], f"{name}: the loss does not fall")
    if scaling := config["rope_llama3"]:
        unscaled = plain_llama.inverse_frequencies(config | {"rope_llama3": None})
        turns = scaling["original_context"] * unscaled / (2 * torch.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        bands = [(turns > high).sum(), (turns < low).sum()]
        bands = [int(count) for count in (*bands, len(turns) - sum(bands))]
        require(all(bands), f"{name}: llama3 bands high, low, medium hold {bands} frequencies")
    return clipped


def make_case(name):
    """(header, tensors) of one golden file."""
    seed, final_norm, some_ignored, config = CASES[name]
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = random_weights(make_model(config), final_norm, rng)
    tokens, labels = random_batch(config, some_ignored, rng, 1 + TRAINING["steps"])
    batch, train_batch = (tokens[0], labels[0]), (tokens[1:], labels[1:])
    rotary = modeling_llama.LlamaRotaryEmbedding
    forward = rotary.forward if config["hf_parity"] else rotary_with_exact_angles
    with mock.patch.object(rotary, "forward", forward):
        naive = run(config, weights, batch, train_batch, torch.float32)
        rope = rope_tables(config)
        with mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", rms_norm_in_input_dtype):
            exact = run(config, weights, batch, train_batch, torch.float64)
    worst = check_against_plain(name, config, weights, batch, train_batch, exact)
    clipped = check_is_telling(name, config, exact)
    errors = {key: relative_error(naive[key], exact[key]) for key in exact}
    del errors["train/learning_rates"]
    print(f"{name}: loss {exact['loss'][0]:.4f}, training {exact['train/losses'][0]:.4f} to "
          f"{exact['train/losses'][-1]:.4f}, clipped {clipped} of {TRAINING['steps']} steps; "
          f"plain_llama.py within {worst[0]:.1e} ({worst[1]})")  # fmt: skip
    header = {
        "name": name,
        "config": config,
        "training": TRAINING,
        "angles": "float32, transformers' own" if config["hf_parity"] else "float64",
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "fp32_errors": errors,
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
        print(f"  {path.name}: {path.stat().st_size} bytes; PyTorch's float32 errors:")
        for key, error in header["fp32_errors"].items():
            print(f"    {error:.2e}  {key}")


if __name__ == "__main__":
    main()
