"""Llama's loss and AdamW from their formulas, sharing no code with transformers or torch.optim.

make_goldens.py refuses to write a file unless this agrees with transformers, so a new version of a
pinned package cannot silently change what the goldens mean.
"""

import math

import torch


def inverse_frequencies(config, dtype=torch.float64):
    """[head_dim / 2]; llama3 scaling in `dtype` where the config asks for it."""
    exponents = torch.arange(0, config["head_dim"], 2, dtype=dtype) / config["head_dim"]
    frequencies = 1.0 / config["rope_theta"] ** exponents
    scaling = config["rope_llama3"]
    if scaling is None:
        return frequencies
    scaled = []
    for frequency in frequencies:
        turns = scaling["original_context"] * frequency / (2 * math.pi)
        smooth = (turns - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        smooth = smooth.clamp(0.0, 1.0)  # 1: keep the frequency; 0: divide it by the factor
        scaled.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return torch.stack(scaled)


def angles(config, num_tokens):
    """[num_tokens, head_dim / 2] in float64; under hf_parity rounded like transformers'."""
    dtype = torch.float32 if config["hf_parity"] else torch.float64
    return torch.outer(torch.arange(num_tokens, dtype=dtype), inverse_frequencies(config, dtype))


def rotate(x, config):
    """Rotary embedding of x [tokens, heads, head_dim]: dimension i pairs with i + head_dim / 2."""
    theta = angles(config, x.shape[0])
    cos, sin = theta.cos().to(x.dtype)[:, None], theta.sin().to(x.dtype)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def loss(weights, config, tokens, labels):
    """Mean of -log p(label) over rows whose label is not -100. `labels[i]` is row i's target."""

    def norm(x, name):
        return weights[name] * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    num_tokens, group = len(tokens), config["heads"] // config["kv_heads"]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["layers"]):
        p = f"model.layers.{layer}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            (y @ weights[f"{p}self_attn.{n}_proj.weight"].T).unflatten(1, (-1, config["head_dim"]))
            for n in "qkv"
        )
        q, k = rotate(q, config), rotate(k, config)
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


def learning_rate(training, step):
    """Of `step` = 1 .. steps: linear warm-up, then half a cosine down to min_lr."""
    peak, low, warmup = training["peak_lr"], training["min_lr"], training["warmup_steps"]
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (training["steps"] - warmup)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * done))


def train(weights, config, training, tokens, labels):
    """Clipped AdamW, one row of tokens [steps, tokens] a step. Returns (losses, norms, weights)."""
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    losses, norms = [], []
    for step in range(1, training["steps"] + 1):
        value = loss(weights, config, tokens[step - 1], labels[step - 1])
        gradients = dict(zip(weights, torch.autograd.grad(value, list(weights.values()))))
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in gradients.values()))
        clip = min(1.0, training["clip_norm"] / (norm + training["clip_eps"]))
        lr = learning_rate(training, step)
        with torch.no_grad():
            for name, w in weights.items():
                g = gradients[name] * clip
                decay = training["weight_decay"] if w.dim() >= 2 else 0.0
                m[name] += (1 - training["beta1"]) * (g - m[name])
                v[name] += (1 - training["beta2"]) * (g * g - v[name])
                m_hat = m[name] / (1 - training["beta1"] ** step)
                v_hat = v[name] / (1 - training["beta2"] ** step)
                w -= lr * (m_hat / (v_hat.sqrt() + training["eps"]) + decay * w)
        losses.append(value.item())
        norms.append(norm)
    return losses, norms, {name: w.detach() for name, w in weights.items()}
