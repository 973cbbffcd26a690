"""The golden file format: 8 magic bytes, a length-prefixed JSON header, raw little-endian tensors.

    bytes 0..7    b"UPGOLD01"
    bytes 8..15   unsigned 64-bit length N of the JSON header, spaces at its end included
    bytes 16..    N bytes of UTF-8 JSON; N is chosen so that 16 + N is a multiple of 64
    then          the tensors; a tensor's "offset" counts from 16 + N and is a multiple of 64

The header's "tensors" is a list of {"name", "shape", "dtype": "f32" | "f64" | "i32", "offset"}.
tests/golden/engine/golden_file.cc is the reader the tests use.
"""

import json
import math
import struct

import numpy as np

MAGIC = b"UPGOLD01"
ALIGNMENT = 64
DTYPES = {"f32": np.dtype("<f4"), "f64": np.dtype("<f8"), "i32": np.dtype("<i4")}


def _padding(size):
    return -size % ALIGNMENT


def write(path, header, tensors):
    """Writes {name: numpy array of a dtype in DTYPES} with `header` (a dict without "tensors")."""
    entries, blobs, offset = [], [], 0
    for name, array in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == array.dtype)
        blob = np.ascontiguousarray(array).tobytes()
        entries.append({"name": name, "shape": list(array.shape), "dtype": dtype, "offset": offset})
        blobs.append(blob + b"\0" * _padding(len(blob)))
        offset += len(blobs[-1])
    text = json.dumps({**header, "tensors": entries}, separators=(",", ":")).encode()
    text += b" " * _padding(len(MAGIC) + 8 + len(text))
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read(path):
    """Returns (header without "tensors", {name: array})."""
    with open(path, "rb") as file:
        content = file.read()
    if content[:8] != MAGIC:
        raise ValueError(f"{path} is no golden file: it starts with {content[:8]!r}, not {MAGIC!r}")
    (length,) = struct.unpack("<Q", content[8:16])
    header = json.loads(content[16 : 16 + length])
    tensors = {}
    for entry in header.pop("tensors"):
        tensors[entry["name"]] = np.frombuffer(
            content,
            DTYPES[entry["dtype"]],
            math.prod(entry["shape"]),
            16 + length + entry["offset"],
        ).reshape(entry["shape"])
    return header, tensors
