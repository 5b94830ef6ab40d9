"""The list `data.preprocess`: what is done to each sample between source and batch, and by how many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from schemas.base import Part
from schemas.callables import misnamed
from schemas.marks import HOLDS_USER_VALUES, Url

MOST_FUNCTIONS, MOST_REPLICAS = 16, 1024
"""Functions of a chain, and instances of one of them."""

BUILT_IN = ("tokenize", "normalize", "augment", "extract")


def _known(value: str) -> str:
    if value in BUILT_IN:
        return value
    if ":" not in value:
        raise ValueError(f"{value!r} is none of {', '.join(BUILT_IN)}; your own is named module:callable")
    if reason := misnamed(value):
        raise ValueError(reason)
    return value


class PreprocessSpec(Part):
    """One function of the chain, from one sample to one sample, and the instances that apply it.

    The function's `args` are: `tokenize`: field, length, ignore_index; `normalize`: fields, mean, std;
    `augment`: fields, transforms; `extract`: fields; of your own: what it takes beside the sample.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="what its instances are called")
    function: Annotated[str, AfterValidator(_known)] = Field(
        max_length=512, description="tokenize, normalize, augment, extract, or module:callable of your own"
    )
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="what the function takes beside the sample"
    )
    tokenizer: Url | None = Field(None, description="of tokenize: a file or folder, as for kind text")
    replicas: int = Field(1, ge=1, le=MOST_REPLICAS, description="instances that the job begins with")

    @property
    def is_users(self) -> bool:
        return self.function not in BUILT_IN

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> PreprocessSpec:
        if (self.tokenizer is None) is (self.function == "tokenize"):
            raise ValueError(
                f"{self.name}: "
                + ("tokenize needs tokenizer" if self.tokenizer is None else "tokenizer is for tokenize")
            )
        return self


def check_chain(chain: Sequence[PreprocessSpec]) -> None:
    """Checks that the functions of a chain can be told apart.

    Raises:
        ValueError: Two have one name, or one has a name that other units have.
    """
    names = [each.name for each in chain]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"preprocess: two functions are called {name}: give each a name of its own")
        if name in ("data", "stage"):
            raise ValueError(f"preprocess: {name} is what other units are called; choose another name")
