"""Small idx files for tests, written byte by byte."""

import gzip
import struct
from pathlib import Path

import numpy as np


def encode(values: np.ndarray) -> bytes:
    code, dtype = (0x08, ">u1") if values.dtype == np.uint8 else (0x0C, ">i4")
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, code, values.ndim, *values.shape)
    return header + values.astype(dtype).tobytes()


def write(path: Path, values: np.ndarray) -> Path:
    content = encode(values)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def images(num_records: int, *, side: int = 28, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_records, side, side)).astype(np.uint8)
