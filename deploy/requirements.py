"""Prints the runtime dependencies of pyproject.toml, so that an image's layer holds them alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["dependencies"], sep="\n")
