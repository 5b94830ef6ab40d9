"""The forms in which a version leaves; apart from what writes them, which the command line loads late."""

from __future__ import annotations

from enum import StrEnum


class ModelForm(StrEnum):
    """Who is to load a version."""

    HF = "hf"
    OCI = "oci"
    MLFLOW = "mlflow"
