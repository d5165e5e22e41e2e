"""Small public data sets, splits that leave gaps, and shifts of images.

Sets in files are looked for in the folder $LAPIS_DATA, then in a cache ($LAPIS_CACHE, ~/.cache/lapis), into which they
are downloaded, and compared with known checksums. Nothing is ever unpickled.
"""

from __future__ import annotations

from lapis.data.repository import UCI, uci
from lapis.data.sets import breast_cancer, cifar10, diabetes, digits, fashion_mnist, images, mnist
from lapis.data.shifts import blurred, corruptions, faded, moved, noisy, rotated, rotations
from lapis.data.splits import Split, gap_splits, random_split
from lapis.data.stores import folder, stored

__all__ = [
    "UCI",
    "Split",
    "blurred",
    "breast_cancer",
    "cifar10",
    "corruptions",
    "diabetes",
    "digits",
    "faded",
    "fashion_mnist",
    "folder",
    "gap_splits",
    "images",
    "mnist",
    "moved",
    "noisy",
    "random_split",
    "rotated",
    "rotations",
    "stored",
    "uci",
]
