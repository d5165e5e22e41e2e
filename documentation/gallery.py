"""Draw the pictures of docs/gallery.md by running its examples: each section's `figure` goes where its image points.

`python documentation/gallery.py` (with Lapis installed, or PYTHONPATH=src); the pictures are committed.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")


def main() -> None:
    names: dict[str, Any] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        for example in doctest.DocTestParser().get_examples(section):
            exec(compile(example.source, str(PAGE), "single"), names)
        found = IMAGE.search(section)
        if found:
            path = PAGE.parent / found[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            names["figure"].savefig(path, dpi=100)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
