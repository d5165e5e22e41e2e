"""Images and tables that everybody uses: scikit-learn's own, MNIST, Fashion-MNIST, CIFAR-10."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor

from lapis.data.stores import Arrays, changed, check_arrays, download, stored
from lapis.options import check_arguments, check_choice

Part = Literal["train", "test"]

IDX = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    ),
    "fashion_mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    ),
}
"""Addresses, and checksums of the decoded bytes: training images and labels, test images and labels."""

CIFAR = (
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
"""The version without pickles, and the checksum of the archive."""


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 digits: pixels (N, 1, 8, 8) in 0..1, and classes.

    >>> x, y = digits()
    >>> tuple(x.shape), int(y.max())
    ((1797, 1, 8, 8), 9)
    """
    found = load_digits()
    return torch.from_numpy(found.images).float()[:, None] / 16, torch.from_numpy(found.target).long()


def diabetes() -> tuple[Tensor, Tensor]:
    """scikit-learn's 442 patients: ten columns as they were measured, and the progression of diabetes; float64."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return torch.from_numpy(x), torch.from_numpy(y)


def breast_cancer() -> tuple[Tensor, Tensor]:
    """scikit-learn's 569 tumours: thirty columns in float64, and classes, 0 malignant and 1 benign."""
    x, y = load_breast_cancer(return_X_y=True)
    return torch.from_numpy(x), torch.from_numpy(y).long()


def mnist(part: Part = "train") -> tuple[Tensor, Tensor]:
    """MNIST: pixels (N, 1, 28, 28) in 0..1 and classes; 60,000 to train on, 10,000 to test."""
    check_arguments(mnist, locals())
    return images("mnist", part)


def fashion_mnist(part: Part = "train") -> tuple[Tensor, Tensor]:
    """Fashion-MNIST, laid out as MNIST."""
    check_arguments(fashion_mnist, locals())
    return images("fashion_mnist", part)


def cifar10(part: Part = "train") -> tuple[Tensor, Tensor]:
    """CIFAR-10: pixels (N, 3, 32, 32) in 0..1 and classes; 50,000 to train on, 10,000 to test."""
    check_arguments(cifar10, locals())
    return images("cifar10", part)


def images(name: str, part: str) -> tuple[Tensor, Tensor]:
    """Images (N, channels, height, width) in 0..1, and classes, of any set that is stored as x_train, y_train, ..."""
    check_arguments(images, locals())
    make: Callable[[], Arrays] | None = partial(_idx_set, name) if name in IDX else None
    arrays = stored(name, _cifar10 if name == "cifar10" else make)
    check_choice("part", part, [key.removeprefix("x_") for key in arrays if key.startswith("x_")])
    x = torch.from_numpy(arrays[f"x_{part}"]).float() / 255
    y = torch.from_numpy(arrays[f"y_{part}"].astype(np.int64))
    return (x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()), y


def _idx_set(name: str) -> Arrays:
    base, checksum = IDX[name]
    files = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1", "x_test": "t10k-images-idx3",
             "y_test": "t10k-labels-idx1"}  # fmt: skip
    arrays = {key: read_idx(download(f"{base}{file}-ubyte.gz"), base) for key, file in files.items()}
    check_arrays(base, arrays.values(), checksum)
    return arrays


def read_idx(content: bytes, what: str) -> npt.NDArray[Any]:
    """The array in a gzipped idx file of bytes."""
    try:
        raw = gzip.decompress(content)
        zero, kind, dimensions = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
        if (zero, kind) != (0, 8):
            raise changed(what)
        array: npt.NDArray[Any] = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
        return array
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise changed(what) from error


def _cifar10() -> Arrays:
    """Six files of records: a label, and 3 x 32 x 32 pixels."""
    url, checksum = CIFAR
    with tarfile.open(fileobj=io.BytesIO(download(url, checksum))) as archive:
        batches = {name: _records(archive, name) for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")}
    train = np.concatenate([batches[f"data_batch_{i}"] for i in range(1, 6)])
    arrays = {}
    for part, rows in (("train", train), ("test", batches["test_batch"])):
        arrays[f"x_{part}"] = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()
        arrays[f"y_{part}"] = rows[:, 0].copy()
    return arrays


def _records(archive: tarfile.TarFile, name: str) -> npt.NDArray[Any]:
    file = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
    if file is None:
        raise changed(CIFAR[0])
    return np.frombuffer(file.read(), np.uint8).reshape(-1, 3073)
