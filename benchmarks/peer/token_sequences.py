"""Reads the sequences of a packed folder in the order our engine trains on them: the shard format of
engine/data/token_shard.h, the window order of engine/data/sequence_source.cc."""

import numpy

MASK64 = (1 << 64) - 1
HEADER_BYTES = 64
MAGIC = b"UPTOKENS"


def mix(x):
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def draw(seed, epoch, stream):
    golden = 0x9E3779B97F4A7C15
    return mix((mix((mix((seed + golden) & MASK64) + epoch + golden) & MASK64) + stream + golden) & MASK64)


def permute(index, size, key):
    """The image of index under a seeded permutation of 0 .. size - 1: a Feistel network, walked."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(6):
            left, right = right, left ^ (draw(key, right, round_number) & mask)
        index = left << half_bits | right
        if index < size:
            return index


class TokenSequences:
    def __init__(self, folder, context, seed):
        header = numpy.fromfile(f"{folder}/train.tokens", numpy.uint8, HEADER_BYTES).tobytes()
        if header[:8] != MAGIC:
            raise SystemExit(f"{folder}/train.tokens is no token shard")
        num_tokens = int.from_bytes(header[24:32], "little")
        self.tokens = numpy.memmap(
            f"{folder}/train.tokens", numpy.uint16, "r", HEADER_BYTES, (num_tokens,)
        )
        self.context, self.seed = context, seed
        window = context + 1
        self.windows = max(1, (num_tokens - context) // window)
        self.slack = num_tokens - self.windows * window

    def offset(self, sequence):
        """Of the sequence's first token in the shard."""
        epoch = sequence // self.windows
        first = draw(self.seed, epoch, 0) % (self.slack + 1)
        place = permute(sequence % self.windows, self.windows, draw(self.seed, epoch, 1))
        return first + place * (self.context + 1)

    def read(self, sequence, begin, count):
        """(tokens, labels), int64 [count] each, of positions begin .. begin + count - 1."""
        at = self.offset(sequence) + begin
        window = self.tokens[at : at + count + 1].astype(numpy.int64)
        return window[:-1], window[1:]
