"""Results that are there already: a JSON file beside the report, written after every piece of work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS


class Store:
    """Entries by name; `get` computes what is missing, and keeps it."""

    def __init__(self, quick: bool) -> None:
        self.path = RESULTS / f"tomography{'_quick' if quick else ''}.json"
        self.entries: dict[str, Any] = self._kept()

    def _kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.entries:
            print(name, flush=True)  # noqa: T201
            made = {name: make()}
            self.entries = self._kept() | made  # with what another run has added meanwhile
            partial = Path(f"{self.path}.partial")
            lines = (f"{json.dumps(key)}: {json.dumps(self.entries[key])}" for key in sorted(self.entries))
            partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            os.replace(partial, self.path)
        return self.entries[name]
