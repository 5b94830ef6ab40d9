"""Writes a version, whose files have been fetched, in the form that somebody else loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from dmsc.client.model_folder import check_files
from dmsc.models.forms import ModelForm
from dmsc.models.hugging_face import config_in, write_card
from dmsc.models.mlflow_layout import write_mlflow
from dmsc.models.oci_layout import write_oci
from schemas.errors import BadInput
from schemas.models.version import ModelVersion


def require_empty(out: Path) -> None:
    """Raise `BadInput` if the folder has anything in it: an export mixes with nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} is there and not empty: name another folder")


def export_model(source: Path, out: Path, version: ModelVersion, form: ModelForm) -> str:
    """Write the files of `source` as `form` into `out`; return a line that says what loads it.

    The files are compared with the version's digests first, so that what leaves is what was registered.

    Raises:
        BadInput: `out` is not empty, or the version has no config that the form wants.
        BadData: A file is not the version's.
    """
    require_empty(out)
    check_files(source, version.files)
    if form is ModelForm.OCI:
        digest = write_oci(source, out, version)
        return f"{digest}; oras cp --from-oci-layout {out}:{version.version} REGISTRY/{version.name}"
    if form is ModelForm.MLFLOW:
        write_mlflow(source, out, version)
        return f"mlflow.transformers.load_model({str(out)!r})"
    config = config_in(source, version)
    out.mkdir(parents=True, exist_ok=True)
    for file in version.files:
        shutil.copyfile(source / file.name, out / file.name)
    write_card(out, version)
    return f"transformers loads it: model_type {config['model_type']}, from_pretrained({str(out)!r})"
