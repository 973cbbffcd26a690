"""The initial weights of a job, as our engine draws them: Philox4x32-10 keyed by the seed and counted by
(tensor, element), then Box-Muller in double (kernels/api/counter_normal.h); tensors in the layout of
engine/model/parameters.cc. Both sides of the comparison start from these numbers."""

import math

import numpy

MASK64 = (1 << 64) - 1
PRIMES64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def xxh64(data):
    """xxHash64 with seed 0, as its specification writes it."""
    p1, p2, p3, p4, p5 = PRIMES64

    def rotate(x, bits):
        return ((x << bits) | (x >> (64 - bits))) & MASK64

    def round64(accumulator, lane):
        return rotate((accumulator + lane * p2) & MASK64, 31) * p1 & MASK64

    def word(at, size):
        return int.from_bytes(data[at : at + size], "little")

    at = 0
    if len(data) >= 32:
        lanes = [(p1 + p2) & MASK64, p2, 0, -p1 & MASK64]
        while at + 32 <= len(data):
            lanes = [round64(lane, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        hashed = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK64
        for lane in lanes:
            hashed = ((hashed ^ round64(0, lane)) * p1 + p4) & MASK64
    else:
        hashed = p5
    hashed = (hashed + len(data)) & MASK64
    while at + 8 <= len(data):
        hashed = (rotate(hashed ^ round64(0, word(at, 8)), 27) * p1 + p4) & MASK64
        at += 8
    if at + 4 <= len(data):
        hashed = (rotate(hashed ^ (word(at, 4) * p1 & MASK64), 23) * p2 + p3) & MASK64
        at += 4
    for byte in data[at:]:
        hashed = rotate(hashed ^ (byte * p5 & MASK64), 11) * p1 & MASK64
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        hashed = (hashed ^ (hashed >> shift)) * prime & MASK64
    return hashed


def counter_normal(seed, tensor_id, count):
    """float64 [count]: standard normal numbers of elements 0 .. count - 1."""
    low = numpy.uint64(0xFFFFFFFF)
    index = numpy.arange(count, dtype=numpy.uint64)
    counter = [
        index & low,
        index >> numpy.uint64(32),
        numpy.full(count, tensor_id & 0xFFFFFFFF, numpy.uint64),
        numpy.full(count, tensor_id >> 32, numpy.uint64),
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    shift = numpy.uint64(32)
    for _ in range(10):
        product0 = numpy.uint64(0xD2511F53) * counter[0]
        product1 = numpy.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (product1 >> shift) ^ counter[1] ^ numpy.uint64(key[0]),
            product1 & low,
            (product0 >> shift) ^ counter[3] ^ numpy.uint64(key[1]),
            product0 & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]

    def unit(high, rest):
        return ((high << numpy.uint64(21)) | (rest >> numpy.uint64(11))).astype(numpy.float64)

    u = (unit(counter[0], counter[1]) + 0.5) * 2.0**-53
    v = unit(counter[2], counter[3]) * 2.0**-53
    return numpy.sqrt(-2 * numpy.log(u)) * numpy.cos(2 * math.pi * v)


def tensors(model):
    """[(Hugging Face name, shape, standard deviation; 0 = all ones)] of a job's `model`."""
    d, width = model["hidden_size"], model["head_dim"]
    heads, kv_heads, f = model["num_heads"], model["num_kv_heads"], model["intermediate_size"]
    stddev = model["init_stddev"]
    out = stddev / math.sqrt(2.0 * model["num_layers"])
    listed = [("model.embed_tokens.weight", (model["vocab_size"], d), stddev)]
    for layer in range(model["num_layers"]):
        block = [
            ("input_layernorm.weight", (d,), 0),
            ("self_attn.q_proj.weight", (heads * width, d), stddev),
            ("self_attn.k_proj.weight", (kv_heads * width, d), stddev),
            ("self_attn.v_proj.weight", (kv_heads * width, d), stddev),
            ("self_attn.o_proj.weight", (d, heads * width), out),
            ("post_attention_layernorm.weight", (d,), 0),
            ("mlp.gate_proj.weight", (f, d), stddev),
            ("mlp.up_proj.weight", (f, d), stddev),
            ("mlp.down_proj.weight", (d, f), out),
        ]
        listed += [(f"model.layers.{layer}.{name}", shape, s) for name, shape, s in block]
    listed.append(("model.norm.weight", (d,), 0))
    listed.append(("lm_head.weight", (model["vocab_size"], d), stddev))
    return listed


def draw(seed, name, shape, stddev):
    """float32 array of one tensor."""
    if stddev == 0:
        return numpy.ones(shape, numpy.float32)
    # The engine scales in double by the standard deviation it keeps as a float.
    numbers = counter_normal(seed, xxh64(name.encode()), math.prod(shape))
    return (numpy.float64(numpy.float32(stddev)) * numbers).astype(numpy.float32).reshape(shape)


def write(model, seed, path):
    """All tensors, fp32, one after the other in the order of tensors(); one in memory at a time."""
    with open(path, "wb") as file:
        for name, shape, stddev in tensors(model):
            file.write(draw(seed, name, shape, stddev).tobytes())
