"""What the built-in steps of a build take: one model each, so that a mistake is named at submission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Bound = Annotated[int, Field(ge=0, lt=1 << 53)]
FieldName = Annotated[str, Field(min_length=1, max_length=256)]


class StepArgs(BaseModel):
    """The `args` of one step, strict about their names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CleanArgs(StepArgs):
    """The text in Unicode's normal form, without spaces at ends of lines and without control characters.

    `\\n` is what ends a line; form feeds and Unicode's separators of lines become one. Tabs stay.
    """

    form: Literal["NFC", "NFKC", "none"] = "NFC"


class LengthArgs(StepArgs):
    """Bounds of the text, each inclusive. Words are what white space separates; lines are not empty ones."""

    min_characters: Bound = 0
    max_characters: Bound | None = None
    min_words: Bound = 0
    max_words: Bound | None = None
    min_lines: Bound = 0
    max_lines: Bound | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> LengthArgs:
        fields = LengthArgs.model_fields
        if all(getattr(self, name) == field.default for name, field in fields.items()):
            raise ValueError("it bounds nothing; give one of " + ", ".join(fields))
        for unit in ("characters", "words", "lines"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most is not None and most < least:
                raise ValueError(f"max_{unit} {most:,} is less than min_{unit} {least:,}")
        return self


class RepetitionArgs(StepArgs):
    """Largest shares of what was there before in the same text: lines, and runs of `words` words.

    A share is 1 − different ones / all (Rae et al. 2021, Gopher, A.1.1).
    """

    lines: Share = 0.3
    runs: Share = 0.2
    words: int = Field(5, ge=1, le=100)


class ScoreArgs(StepArgs):
    """A field's number lies within a range, both ends inclusive."""

    field: FieldName
    min: float | None = Field(None, allow_inf_nan=False)
    max: float | None = Field(None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _bounds_something(self) -> ScoreArgs:
        if self.min is None and self.max is None:
            raise ValueError("it bounds nothing; give min, max or both")
        if self.min is not None and self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max:g} is less than min {self.min:g}")
        return self


class ExtractArgs(StepArgs):
    """Only these fields go on: `[names]`, or `{new name: field}`; a dot goes deeper."""

    fields: dict[str, FieldName] | tuple[FieldName, ...] = Field(min_length=1)

    @property
    def paths(self) -> Mapping[str, str]:
        """New name → field."""
        return self.fields if isinstance(self.fields, dict) else {name: name for name in self.fields}


class ExactDuplicatesArgs(StepArgs):
    """Equal texts: the first stays. It has no arguments."""


class NearDuplicatesArgs(StepArgs):
    """MinHash (Broder 1997) over runs of `words` words, in `bands` bands of equal height.

    A record falls away if an earlier one has all values of a band in common with it, and of all values a
    share of at least `threshold`. More permutations: a better estimate, more work. More bands: fewer pairs
    missed.
    """

    threshold: float = Field(0.8, gt=0.0, le=1.0, allow_inf_nan=False)
    permutations: int = Field(128, ge=8, le=1024)
    bands: int = Field(16, ge=1, le=256)
    words: int = Field(5, ge=1, le=100)

    @model_validator(mode="after")
    def _bands_of_equal_height(self) -> NearDuplicatesArgs:
        if self.permutations % self.bands:
            raise ValueError(f"{self.permutations} permutations are no multiple of {self.bands} bands")
        return self


class TokenizeArgs(StepArgs):
    """As `eos` and `special_tokens` of kind text."""

    eos: str = Field("auto", max_length=256)
    special_tokens: bool = False


class PackArgs(StepArgs):
    """Windows: over all documents of a group (concatenate), or whole documents, padded (best_fit)."""

    sample_tokens: int = Field(ge=2, le=1 << 20)
    how: Literal["concatenate", "best_fit"] = "concatenate"


ARGS: dict[str, type[StepArgs]] = {
    "clean": CleanArgs,
    "length": LengthArgs,
    "repetition": RepetitionArgs,
    "score": ScoreArgs,
    "extract": ExtractArgs,
    "exact_duplicates": ExactDuplicatesArgs,
    "near_duplicates": NearDuplicatesArgs,
    "tokenize": TokenizeArgs,
    "pack": PackArgs,
}
"""Built-in step → what it takes."""


def parsed_args(function: str, args: Mapping[str, Any]) -> StepArgs:
    """The arguments of a built-in step.

    Raises:
        ValueError: One line: which is wrong, and why.
    """
    try:
        return ARGS[function].model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(ARGS[function].model_fields) or "none"
            raise ValueError(f"{function} has no argument {place!r}; it has: {known}") from None
        if first["type"] == "missing":
            raise ValueError(f"{function} needs the argument {place!r}") from None
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{function}: {f'{place}: ' if place else ''}{reason}") from None
