"""What all trainers have in common: runs in, a trained state with its held-out loss out. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from policies.kit.engine import Event
from policies.kit.policy import Policy
from schemas.errors import BadInput
from schemas.learnt_state import MOST_LEARNT_BYTES, canonical_json, parsed_json

HELD_OUT = 0.3
"""Share of the runs, or of each run's time where there are fewer than three, that is not learnt from."""
MARGIN = 1e-3
"""Share of the present loss that a trained state has to save to be better."""
FEW = 3
"""Runs from which whole runs are held out."""

Example = TypeVar("Example")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recorded run, in order of time."""

    name: str
    events: Sequence[Event]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained state, and how well it does on examples that it has not seen, beside the present one.

    `data` is canonical JSON that the module restores; losses are in `unit`, less is better.
    """

    module: str
    version: str
    schema_version: int
    data: str
    examples: int
    held_out: int
    loss: float
    loss_now: float
    unit: str

    @property
    def better(self) -> bool:
        """Whether it does better by more than what rounding alone may do."""
        return self.loss < (1 - MARGIN) * self.loss_now


class Trainer(ABC, Generic[Example]):
    """Learns a state of one module.

    Attributes:
        policy: The module's class, whose `restore` takes the state.
        what: Its examples, in words.
        least: Fewest examples to learn from; a third of it must be held out.
        unit: The unit of its loss.
    """

    policy: ClassVar[type[Policy]]
    what: ClassVar[str]
    least: ClassVar[int]
    unit: ClassVar[str]

    @abstractmethod
    def examples(self, run: Run) -> list[Example]:
        """The examples in a run, in order of time."""

    def parted(self, runs: Sequence[Run], rng: np.random.Generator) -> tuple[list[Example], list[Example]]:
        """The examples to learn from, and the held-out ones.

        Raises:
            BadInput: A run holds what is no example.
        """
        learning, held = _split(runs, rng)
        return (
            [example for run in learning for example in examples_of(self, run)],
            [example for run in held for example in examples_of(self, run)],
        )

    @abstractmethod
    def learn(self, examples: Sequence[Example], now: Any, rng: np.random.Generator) -> Any:
        """The trained state, from the present one. Raises `BadInput` if the examples can't teach it."""

    @abstractmethod
    def loss(self, state: Any, examples: Sequence[Example]) -> float:
        """The mean loss of a state on examples."""


def train(trainer: Trainer[Any], runs: Sequence[Run], now: str, *, seed: int = 0) -> Trained:
    """Trains one module from recorded runs. The same runs and seed give the same bytes.

    Args:
        trainer: Whose state is learnt.
        runs: Recorded runs.
        now: The state that the module has now, as canonical JSON; empty: none.
        seed: Of which runs are held out, and of the training.

    Raises:
        BadInput: There are too few examples, or something is not finite; in one line.
    """
    rng = np.random.default_rng(seed)
    name = trainer.policy.name
    learn_from, hold_out = trainer.parted(runs, rng)
    least_held = max(1, trainer.least // 3)
    if len(learn_from) < trainer.least or len(hold_out) < least_held:
        raise BadInput(
            f"{name}: {len(learn_from)} {trainer.what} to learn from and {len(hold_out)} held out; it takes "
            f"{trainer.least} and {least_held}: give more or longer records"
        )
    try:
        present = _restored(trainer.policy, now)
    except Exception as error:  # a state of any form
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BadInput(f"{name}: the present state does not fit: {text}; --reset it") from None
    try:
        state = trainer.learn(learn_from, present, rng)
        data = canonical_json(state)
        trainer.policy().restore(parsed_json(data))
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
        raise BadInput(f"{name}: nothing learnt: {error}") from None
    if len(data.encode()) > MOST_LEARNT_BYTES:
        raise BadInput(f"{name}: the trained state has {len(data)} bytes; {MOST_LEARNT_BYTES} are allowed")
    loss, loss_now = trainer.loss(state, hold_out), trainer.loss(present, hold_out)
    if not math.isfinite(loss):
        raise BadInput(f"{name}: the loss on held-out {trainer.what} is {loss}; nothing learnt")
    return Trained(
        module=name,
        version=trainer.policy.version,
        schema_version=trainer.policy.state_version,
        data=data,
        examples=len(learn_from),
        held_out=len(hold_out),
        loss=loss,
        loss_now=loss_now,
        unit=trainer.unit,
    )


def examples_of(trainer: Trainer[Example], run: Run) -> list[Example]:
    """The examples in a run. Raises `BadInput` if it holds a state that is none."""
    try:
        return trainer.examples(run)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise BadInput(f"{trainer.policy.name}: {run.name}: {type(error).__name__}: {error}") from None


def _restored(policy: type[Policy], now: str) -> Any:
    """The module's present state, as it gives it itself."""
    fresh = policy()
    if now:
        fresh.restore(parsed_json(now))
    return parsed_json(canonical_json(fresh.learnt_state()))


def _split(runs: Sequence[Run], rng: np.random.Generator) -> tuple[list[Run], list[Run]]:
    """Runs to learn from, and held-out ones; of fewer than three runs, the last part of each."""
    if len(runs) >= FEW:
        order = rng.permutation(len(runs))
        held = {int(at) for at in order[: max(1, round(HELD_OUT * len(runs)))]}
        return (
            [run for at, run in enumerate(runs) if at not in held],
            [run for at, run in enumerate(runs) if at in held],
        )
    learning, held_out = [], []
    for run in runs:
        if not run.events:
            continue
        began, ended = run.events[0].at, run.events[-1].at
        cut = began + (1 - HELD_OUT) * (ended - began)
        learning.append(Run(name=run.name, events=[event for event in run.events if event.at <= cut]))
        held_out.append(Run(name=run.name, events=[event for event in run.events if event.at > cut]))
    return learning, held_out
