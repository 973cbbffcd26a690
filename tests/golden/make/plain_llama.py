"""The loss of Llama, Qwen2 and Qwen3, and AdamW, from their formulas, sharing no code with
transformers or torch.optim.

make_goldens.py refuses to write a file unless this agrees with transformers, so a new version of a
pinned package cannot silently change what the goldens mean.
"""

import math

import torch


def _llama3(frequency, scaling):
    turns = scaling["original_context"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def yarn_blend(config):
    """[head_dim / 2]: 1 where a frequency is kept, 0 where it is divided by the factor."""
    scaling, dim = config["rope_scaling"], config["head_dim"]

    def pair_that_turns(times):  # the pair, counted in dims, that makes so many turns
        wavelength = scaling["original_context"] / times
        return dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(config["rope_theta"])

    first, last = pair_that_turns(scaling["beta_fast"]), pair_that_turns(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


def inverse_frequencies(config):
    """[head_dim / 2] in float64, scaled as the config asks."""
    dim, theta, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"] or {}
    kind = scaling.get("type")
    if kind == "dynamic" and config["context_tokens"] > scaling["original_context"]:
        stretch = scaling["factor"] * config["context_tokens"] / scaling["original_context"]
        theta *= (stretch - (scaling["factor"] - 1)) ** (dim / (dim - 2))
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return torch.stack([_llama3(f, scaling) for f in frequencies])
    if kind == "yarn":
        keep = yarn_blend(config)
        return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    return frequencies


def magnitude(config):
    """What the rotation multiplies q and k by."""
    scaling = config["rope_scaling"] or {}
    if scaling.get("type") != "yarn":
        return 1.0
    if scaling["attention_factor"] is not None:
        return scaling["attention_factor"]
    return 0.1 * math.log(scaling["factor"]) + 1


def rotate(x, config):
    """Rotary embedding of x [tokens, heads, head_dim]: dimension i pairs with i + head_dim / 2."""
    positions = torch.arange(x.shape[0], dtype=torch.float64)
    theta = torch.outer(positions, inverse_frequencies(config))[:, None]
    cos, sin = (magnitude(config) * wave.to(x.dtype) for wave in (theta.cos(), theta.sin()))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def loss(weights, config, tokens, labels):
    """Mean of -log p(label) over rows whose label is not -100. `labels[i]` is row i's target."""

    def norm(x, name):
        return weights[name] * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    def project(x, name):  # [tokens, heads of this kind, head_dim]
        y = x @ weights[name + "_proj.weight"].T
        if config["qkv_bias"]:
            y = y + weights[name + "_proj.bias"]
        y = y.unflatten(1, (-1, config["head_dim"]))
        if config["qk_norm"] and not name.endswith("v"):
            y = norm(y, name + "_norm.weight")
        return y if name.endswith("v") else rotate(y, config)

    num_tokens, group = len(tokens), config["heads"] // config["kv_heads"]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["layers"]):
        p = f"model.layers.{layer}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (project(y, f"{p}self_attn.{kind}") for kind in "qkv")
        heads = []
        for head in range(config["heads"]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(config["head_dim"])
            scores = scores.masked_fill(future, -math.inf).exp()
            heads.append(scores @ v[:, head // group] / scores.sum(-1, keepdim=True))
        x = x + torch.cat(heads, dim=-1) @ weights[p + "self_attn.o_proj.weight"].T
        y = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[p + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tied_embeddings"] else "lm_head.weight"
    logits = norm(x, "model.norm.weight") @ weights[head].T
    valid = labels != -100
    rows = logits[valid]
    return (rows.logsumexp(-1) - rows[torch.arange(len(rows)), labels[valid]]).mean()


def gradients(weights, config, tokens, labels):
    """(loss, {name: gradient}) of float64 copies of the weights."""
    leaves = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    value = loss(leaves, config, tokens, labels)
    slope = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return value.item(), dict(zip(leaves, slope))


def learning_rate(training, step):
    """Of `step` = 1 .. steps: linear warm-up, then half a cosine down to min_lr."""
    peak, low, warmup = training["peak_lr"], training["min_lr"], training["warmup_steps"]
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (training["steps"] - warmup)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * done))


def train(weights, config, training, tokens, labels):
    """Clipped AdamW, one row of tokens [steps, tokens] a step. Returns (losses, norms, weights)."""
    weights = {name: w.double().clone() for name, w in weights.items()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    losses, norms = [], []
    for step in range(1, training["steps"] + 1):
        value, slope = gradients(weights, config, tokens[step - 1], labels[step - 1])
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in slope.values()))
        clip = min(1.0, training["clip_norm"] / (norm + training["clip_eps"]))
        lr = learning_rate(training, step)
        for name, w in weights.items():
            g = slope[name] * clip
            decay = training["weight_decay"] if w.dim() >= 2 else 0.0
            m[name] += (1 - training["beta1"]) * (g - m[name])
            v[name] += (1 - training["beta2"]) * (g * g - v[name])
            m_hat = m[name] / (1 - training["beta1"] ** step)
            v_hat = v[name] / (1 - training["beta2"] ** step)
            w -= lr * (m_hat / (v_hat.sqrt() + training["eps"]) + decay * w)
        losses.append(value)
        norms.append(norm)
    return losses, norms, weights
