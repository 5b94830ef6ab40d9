"""A version as a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schemas.errors import BadInput
from schemas.models.version import ModelVersion


def config_in(folder: Path, version: ModelVersion) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        BadInput: There is none, or it names no model of transformers; one line.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        made_by = f", as {version.factory} is no model of transformers" if version.factory else ""
        raise BadInput(
            f"{version.reference} has no config.json{made_by}: hf and mlflow want one; oci takes it as it is"
        ) from None
    except ValueError:
        raise BadInput(f"{version.reference}: its config.json is no JSON") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise BadInput(f"{version.reference}: its config.json names no model_type")
    return config


def write_card(folder: Path, version: ModelVersion) -> None:
    """Write `dmsc.json`, from which the folder's version, digest and lineage can be read again."""
    body = version.model_dump(mode="json", exclude={"store"})
    (folder / "dmsc.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
