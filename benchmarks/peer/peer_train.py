"""One rank of the peer: PyTorch training the same job file as our engine on the same tokens from the same weights.

What a competent PyTorch user would run on CPUs: scaled_dot_product_attention (the flash kernel), activation
checkpointing of every block, cross entropy in chunks that never hold all logits, fused AdamW on fp32 master weights
sharded over the ranks, gradients in one flat buffer, and DeepSpeed-Ulysses by one gloo all-to-all each way.
peer_bench.py starts it; RANK and the job file say the rest.
"""

import argparse
import json
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import initial_weights
from token_sequences import TokenSequences

LOSS_ROWS = 2048  # rows of logits in memory at once


def status_bytes(field):
    """A field of /proc/self/status that is given in kB."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}")


class AllToAll(torch.autograd.Function):
    """[C, ...] -> [C, ...]: block c goes to rank c."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous())


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of token losses / total from hidden states [N, d] and the head [vocab, d]; gradients are made on the way, so
    that LOSS_ROWS rows of logits exist at a time and none is computed twice."""

    @staticmethod
    def forward(ctx, x, head, labels, total):
        dx, dhead = torch.empty_like(x), torch.zeros_like(head, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float64)
        for begin in range(0, len(x), LOSS_ROWS):
            rows = slice(begin, begin + LOSS_ROWS)
            logits = (x[rows] @ head.t()).float()
            log_sum = logits.logsumexp(-1, keepdim=True)
            loss += (log_sum - logits.gather(1, labels[rows, None])).sum(dtype=torch.float64)
            logits.sub_(log_sum).exp_()
            logits.scatter_add_(1, labels[rows, None], torch.full_like(log_sum, -1.0))
            dlogits = logits.mul_(1.0 / total).to(x.dtype)
            torch.mm(dlogits, head, out=dx[rows])
            if head.dtype == torch.float32:
                dhead.addmm_(dlogits.t(), x[rows])
            else:
                dhead += dlogits.t() @ x[rows]
        ctx.save_for_backward(dx, dhead.to(head.dtype))
        return loss / total

    @staticmethod
    def backward(ctx, _):
        dx, dhead = ctx.saved_tensors
        return dx, dhead, None, None


class FlatParameters:
    """All parameters as views of one buffer in the compute dtype, their gradients of another; fp32 master weights and
    moments of this rank's share only (ZeRO stage 1)."""

    def __init__(self, job, dtype, weights_path, rank, ranks):
        listed = initial_weights.tensors(job["model"])
        # Tensors of two dims decay, the others do not: decayed ones first, so that a share is two slices.
        order = sorted(range(len(listed)), key=lambda i: len(listed[i][1]) == 1)
        sizes = [math.prod(shape) for _, shape, _ in listed]
        decayed = sum(sizes[i] for i in order if len(listed[i][1]) == 2)
        self.share = -(-sum(sizes) // (16 * ranks)) * 16
        begin = rank * self.share
        self.rank, self.ranks = rank, ranks
        self.flat = torch.zeros(self.share * ranks, dtype=dtype)
        self.flat_grad = torch.zeros_like(self.flat)
        whole = torch.zeros(self.share * ranks) if dtype != torch.float32 else self.flat
        self.tensors, at = {}, 0
        file_offsets = [4 * sum(sizes[:i]) for i in range(len(sizes))]
        for i in order:
            name, shape, _ = listed[i]
            values = torch.from_file(weights_path, size=sum(sizes))[file_offsets[i] // 4 :][: sizes[i]]
            whole[at : at + sizes[i]] = values
            parameter = torch.nn.Parameter(self.flat[at : at + sizes[i]].view(shape))
            parameter.grad = self.flat_grad[at : at + sizes[i]].view(shape)
            self.tensors[name] = parameter
            at += sizes[i]
        if whole is not self.flat:
            self.flat.copy_(whole)
        self.master = whole[begin : begin + self.share].clone()
        self.master_grad = torch.zeros_like(self.master)
        split = min(max(decayed - begin, 0), self.share)
        groups = [
            {"params": [self.slice_of(0, split)], "weight_decay": job["optimizer"]["weight_decay"]},
            {"params": [self.slice_of(split, self.share)], "weight_decay": 0.0},
        ]
        o = job["optimizer"]
        self.adamw = torch.optim.AdamW(
            groups, lr=0.0, betas=(o["beta1"], o["beta2"]), eps=o["eps"], fused=True
        )

    def slice_of(self, begin, end):
        parameter = torch.nn.Parameter(self.master[begin:end])
        parameter.grad = self.master_grad[begin:end]
        return parameter

    def update(self, learning_rate, clip_norm):
        """Sums gradients over ranks, clips by the global norm, updates, shares the new weights. Returns the norm."""
        if self.ranks == 1:
            self.master_grad.copy_(self.flat_grad)
        else:
            dist.reduce_scatter_tensor(self.master_grad, self.flat_grad.float())
        squares = self.master_grad.square().sum(dtype=torch.float64)
        if self.ranks > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt().item()
        self.master_grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        own = self.flat[self.rank * self.share : (self.rank + 1) * self.share]
        own.copy_(self.master)
        if self.ranks > 1:
            dist.all_gather_into_tensor(self.flat, own.clone())
        self.flat_grad.zero_()
        return norm


class Llama:
    def __init__(self, model, parameters, dtype, rank, ranks, tokens_per_rank):
        self.model, self.p, self.ranks, self.dtype = model, parameters.tensors, ranks, dtype
        positions = torch.arange(rank * tokens_per_rank, (rank + 1) * tokens_per_rank, dtype=torch.float64)
        half = torch.arange(0, model["head_dim"], 2, dtype=torch.float64) / model["head_dim"]
        angles = torch.outer(positions, model["rope"]["theta"] ** -half)
        self.cos = torch.cat((angles, angles), -1).cos()[:, None].to(dtype)
        self.sin = torch.cat((angles, angles), -1).sin()[:, None].to(dtype)

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def to_heads(self, q, k, v):
        """[N, heads, D] of each -> [T, heads / C, D] of each, in one all-to-all."""
        c = self.ranks
        if c == 1:
            return q, k, v
        if k.shape[1] < c:  # a K/V head for every rank that reads it
            k, v = (x.repeat_interleave(c // x.shape[1], dim=1) for x in (k, v))
        n, width = q.shape[0], q.shape[2]
        parts = [x.view(n, c, -1, width).transpose(0, 1) for x in (q, k, v)]
        out = AllToAll.apply(torch.cat(parts, dim=2)).view(c * n, -1, width)
        return out.split([q.shape[1] // c, k.shape[1] // c, v.shape[1] // c], dim=1)

    def to_tokens(self, out):
        """[T, heads / C, D] -> [N, heads, D]."""
        c = self.ranks
        if c == 1:
            return out
        t, heads, width = out.shape
        received = AllToAll.apply(out.reshape(c, t // c, heads, width))
        return received.transpose(0, 1).reshape(t // c, c * heads, width)

    def norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.model["rms_norm_eps"])

    def block(self, x, layer):
        p = {k.split(".")[-2]: v for k, v in self.p.items() if k.startswith(f"model.layers.{layer}.")}
        y = self.norm(x, p["input_layernorm"])
        width = self.model["head_dim"]
        q, k, v = (F.linear(y, p[f"{n}_proj"]).view(len(x), -1, width) for n in "qkv")
        q, k, v = self.to_heads(self.rotate(q), self.rotate(k), v)
        out = F.scaled_dot_product_attention(
            *(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        out = self.to_tokens(out.squeeze(0).transpose(0, 1)).reshape(len(x), -1)
        x = x + F.linear(out, p["o_proj"])
        y = self.norm(x, p["post_attention_layernorm"])
        return x + F.linear(F.silu(F.linear(y, p["gate_proj"])) * F.linear(y, p["up_proj"]), p["down_proj"])

    def loss(self, tokens, labels, total):
        x = F.embedding(tokens, self.p["model.embed_tokens.weight"])
        for layer in range(self.model["num_layers"]):
            x = checkpoint(self.block, x, layer, use_reentrant=False)
        x = self.norm(x, self.p["model.norm.weight"])
        return ChunkedCrossEntropy.apply(x, self.p["lm_head.weight"], labels, total)


def learning_rate(optimizer, step, steps):
    peak, low, warmup = (optimizer[k] for k in ("learning_rate", "min_learning_rate", "warmup_steps"))
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1.0, steps - warmup))
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))


def train(job, flags, rank, ranks):
    torch.set_num_threads(job["parallel"]["threads_per_rank"])
    torch.set_num_interop_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{flags.rendezvous}", rank=rank, world_size=ranks)
    start_bytes = status_bytes("VmRSS")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job["train"]["dtype"]]
    context, steps = job["train"]["context"], job["train"]["steps"]
    count = context // ranks
    parameters = FlatParameters(job, dtype, flags.weights, rank, ranks)
    model = Llama(job["model"], parameters, dtype, rank, ranks, count)
    sequences = TokenSequences(job["data"]["path"], context, job["train"]["seed"])
    records = []
    for step in range(1, steps + 1):
        start, processor = time.perf_counter(), time.process_time()
        tokens, labels = (torch.from_numpy(x) for x in sequences.read(step - 1, rank * count, count))
        loss = model.loss(tokens, labels, context)
        loss.backward()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        norm = parameters.update(learning_rate(job["optimizer"], step, steps), job["optimizer"]["clip_norm"])
        records.append(
            {
                "step": step,
                "loss": total.item(),
                "grad_norm": norm,
                "step_seconds": time.perf_counter() - start,
                "processor_seconds": time.process_time() - processor,
            }
        )
    return {"start_bytes": start_bytes, "peak_bytes": status_bytes("VmHWM"), "steps": records}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="job file (JSON) with every field that is used")
    parser.add_argument("--weights", required=True, help="file of initial_weights.write")
    parser.add_argument("--output", required=True, help="JSON of this rank")
    parser.add_argument("--rendezvous", help="file where several ranks meet")
    flags = parser.parse_args()
    with open(flags.job) as file:
        job = json.load(file)
    ranks = job["parallel"]["ranks"]
    result = train(job, flags, int(os.environ.get("RANK", "0")), ranks)
    with open(flags.output, "w") as file:
        json.dump(result, file)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
