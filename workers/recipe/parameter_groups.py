"""Which optimizer and which options a parameter has: by its full name and its dimensions alone.

So a parameter has the same options in whichever stage it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from schemas.errors import BadModel
from schemas.job_file.recipe import GroupSpec, OptimizerSpec

_NAMED = 5
"""Parameter names that an error shows."""


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """The optimizer of a parameter: a short name or `module:callable`, and its options.

    `lr` is the peak rate, `base_lr` that of the job, whose schedule it follows. `args` are the optimizer's
    own arguments, `group` those of the parameter's group. `number` is that of the group; None: the parameter
    is in none.
    """

    optimizer: str
    lr: float
    base_lr: float
    args: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None

    @property
    def place(self) -> str:
        """Where the job file says this, for messages."""
        inside = "" if self.number is None else f".groups[{self.number}]"
        return f"training.optimizer{inside}"

    def rate(self, learning_rate: float) -> float:
        """This parameter's rate in a step whose decided rate is `learning_rate`."""
        if self.lr == self.base_lr:
            return learning_rate
        return learning_rate * (self.lr / self.base_lr)


def settings_of(name: str, dims: int, spec: OptimizerSpec) -> ParameterSettings:
    """The settings of one parameter, given its full name and its number of dimensions."""
    for number, group in enumerate(spec.groups):
        if _belongs(name, dims, group):
            return _settings(spec, group, number)
    return _settings(spec, None, None)


def _belongs(name: str, dims: int, group: GroupSpec) -> bool:
    named = not group.match or any(fnmatchcase(name, pattern) for pattern in group.match)
    return named and (not group.dims or dims in group.dims)


def _settings(spec: OptimizerSpec, group: GroupSpec | None, number: int | None) -> ParameterSettings:
    optimizer = spec.factory or spec.name
    own = optimizer if group is None else group.factory or group.name or optimizer
    args: dict[str, Any] = {}
    if own == optimizer:
        args = dict(spec.args)
        if spec.is_adamw:
            args = {"betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay}
    return ParameterSettings(
        optimizer=own,
        lr=spec.lr if group is None or group.lr is None else group.lr,
        base_lr=spec.lr,
        args=args,
        group={} if group is None else dict(group.args),
        number=number,
    )


def check_patterns(named: Sequence[tuple[str, int]], spec: OptimizerSpec) -> None:
    """Checks that each group has a parameter, and each pattern matches one.

    Args:
        named: (full name, dimensions) of all trained parameters of the whole model.
        spec: The optimizer.

    Raises:
        BadModel: A pattern matches nothing, or earlier groups have taken all that a group matches.
    """
    some = ", ".join(name for name, _ in named[:_NAMED]) + (" …" if len(named) > _NAMED else "")
    for number, group in enumerate(spec.groups):
        place = f"training.optimizer.groups[{number}]"
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise BadModel(f"{place}: no parameter's name matches {pattern!r}; there are {some}")
        if not any(_belongs(name, dims, group) for name, dims in named):
            found = sorted({dims for _, dims in named})
            raise BadModel(
                f"{place}: no parameter that it names has dims {list(group.dims)}; there are {found}, as in "
                f"{some}"
            )
        if not any(settings_of(name, dims, spec).number == number for name, dims in named):
            raise BadModel(
                f"{place}: earlier groups have taken all that it matches; the first match counts, so put it "
                "before them"
            )
