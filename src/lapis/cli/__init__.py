"""The command `lapis`."""

from __future__ import annotations

from lapis.cli.main import app

__all__ = ["app"]
