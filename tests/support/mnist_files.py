"""Files in MNIST's format, made up: what the tests of the examples read in its place."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}


def as_idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 0x0800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def made_up() -> dict[str, np.ndarray]:
    """50 images to train on and 20 to test, of 12 pixels."""
    rng = np.random.default_rng(0)
    return {
        "train_x": rng.integers(0, 256, (50, 4, 3)),
        "train_y": np.arange(50) % 10,
        "test_x": rng.integers(0, 256, (20, 4, 3)),
        "test_y": np.arange(20) % 10,
    }


def write(directory: Path, suffix: str = "", **replaced: Any) -> Path:
    """Write the four files, some of them replaced: by an array, by bytes, or by None for no file."""
    directory.mkdir()
    for name, content in {**made_up(), **replaced}.items():
        if content is not None:
            raw = content if isinstance(content, bytes) else as_idx(content)
            raw = gzip.compress(raw) if suffix and not isinstance(content, bytes) else raw
            (directory / f"{NAMES[name]}{suffix}").write_bytes(raw)
    return directory
