"""Prints the runtime dependencies of pyproject.toml, so that an image's layer holds them alone.

The extra `otel` is among them: one image serves every entity, and the tracer is one of them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")
