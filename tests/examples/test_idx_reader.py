"""The reader of MNIST's format, examples/idx.py: what it reads, and which file it says is wrong."""

import gzip
import re

import idx
import numpy as np
import pytest

from tests.support.mnist_files import NAMES, as_idx, made_up, write


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_reader_returns_what_was_written(tmp_path, suffix):
    read = idx.read_mnist(write(tmp_path / "data", suffix))
    for found, wanted in zip(read, made_up().values(), strict=True):
        np.testing.assert_array_equal(found, wanted.reshape(len(wanted), -1).squeeze())
        assert found.dtype == np.uint8


X, Y = np.zeros((50, 4, 3)), np.zeros(50)


@pytest.mark.parametrize(
    ("replaced", "file", "message"),
    [
        ({"train_y": None}, "train_y", "no such file"),
        ({"train_x": as_idx(X, 0x0802)}, "train_x", "starts with 0x00000802, but must with 0x00000803"),
        ({"train_x": as_idx(X, 0x0D03)}, "train_x", "starts with 0x00000d03"),
        ({"train_y": as_idx(X)}, "train_y", "starts with 0x00000803, but must with 0x00000801"),
        ({"test_y": b"\0\0\x08"}, "test_y", "3 bytes, too short for a header of 8"),
        ({"train_x": as_idx(X)[:-1]}, "train_x", "615 bytes, but its shape (50, 4, 3) needs 616"),
        ({"train_x": as_idx(X) + b"\0"}, "train_x", "617 bytes, but its shape (50, 4, 3) needs 616"),
        ({"train_x": np.zeros((50, 0, 3))}, "train_x", "is empty"),
        ({"train_y": Y[1:]}, "train_x", "50 images, but 49 labels in train-labels"),
        ({"test_y": np.full(20, 10)}, "test_y", "labels must be 0 to 9, but one is 10"),
    ],
)
def test_the_reader_says_which_file_is_wrong(tmp_path, replaced, file, message):
    with pytest.raises(idx.IdxError, match=re.escape(message)) as raised:
        idx.read_mnist(write(tmp_path / "data", **replaced))
    assert NAMES[file] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_images_of_two_sizes_are_refused(tmp_path):
    with pytest.raises(idx.IdxError, match="have 12 pixels, test images 9"):
        idx.read_mnist(write(tmp_path / "data", test_x=np.zeros((20, 3, 3))))


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda raw: raw[:-20],
        lambda raw: raw[:30] + bytes(64) + raw[94:],
        lambda raw: raw[:-8] + bytes(8),
        lambda raw: b"not gzip" + raw,
    ],
    ids=["truncated", "damaged", "checksum", "not gzip"],
)
def test_a_corrupt_gzip_file_is_refused(tmp_path, corrupt):
    raw = corrupt(gzip.compress(as_idx(made_up()["train_x"])))
    with pytest.raises(idx.IdxError, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        idx.read_mnist(write(tmp_path / "data", ".gz", train_x=raw))
