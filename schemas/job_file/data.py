"""The section `data`: what it is trained on."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Part
from schemas.marks import Url


class DataSpec(Part):
    """The source of the data: `stdlib:` (the interpreter's own sources), or any URL that fsspec opens.

    `sample_tokens` is the length of one sample (the model's context).
    The last `validation_fraction` of the bytes is held out.
    """

    source: Url = "stdlib:"
    sample_tokens: int = Field(128, ge=2, le=1 << 20)
    validation_fraction: float = Field(0.05, ge=0.0, le=0.5, allow_inf_nan=False)
