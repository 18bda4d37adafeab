"""Read the IDX files of MNIST and of similar data sets, and check every field."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

IMAGES, LABELS = 0x0803, 0x0801  # two zeros, the dtype (8: unsigned byte), the number of dimensions


class IdxError(ValueError):
    """A file is missing, or its content does not match its name."""


def read_mnist(directory: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the four files of MNIST, gzipped or not, from `directory`.

    Returns:
      Training images `(n, pixels)` as uint8, their labels `(n,)`, and the same for the test set.

    Raises:
      IdxError: a file is missing, truncated or of another kind, or two files do not match.
    """
    train, test = (_read_pair(directory, prefix) for prefix in ("train", "t10k"))
    if train[0].shape[1] != test[0].shape[1]:
        raise IdxError(
            f"{directory}: training images have {train[0].shape[1]} pixels, test images {test[0].shape[1]}"
        )
    return *train, *test


def _read_pair(directory: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    images_path = _find(directory, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, IMAGES), read_idx(labels_path, LABELS)
    if len(images) != len(labels):
        raise IdxError(f"{images_path}: {len(images)} images, but {len(labels)} labels in {labels_path.name}")
    if labels.max() > 9:
        raise IdxError(f"{labels_path}: labels must be 0 to 9, but one is {labels.max()}")
    return images.reshape(len(images), -1), labels


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise IdxError(f"{directory / name}: no such file, nor one ending in .gz")


def read_idx(path: Path, magic: int) -> np.ndarray:
    """Read one file that must begin with `magic`, as an array of uint8."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise IdxError(f"{path}: cannot be read: {error}") from error
    rank = magic & 0xFF
    header = 4 * (1 + rank)
    if len(content) < header:
        raise IdxError(f"{path}: {len(content)} bytes, too short for a header of {header}")
    found, *shape = struct.unpack_from(f">{1 + rank}I", content)
    if found != magic:
        raise IdxError(f"{path}: starts with 0x{found:08x}, but must with 0x{magic:08x}")
    if 0 in shape:
        raise IdxError(f"{path}: is empty, its shape is {tuple(shape)}")
    if len(content) != header + math.prod(shape):
        raise IdxError(
            f"{path}: {len(content)} bytes, but its shape {tuple(shape)} needs {header + math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
