"""A re-cut of a running job: its stages get other layers while it trains (ADR-0090)."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.errors import BadInput
from schemas.job_file.parallel import MOST_STAGES
from schemas.step import AttemptMessage, Member, VersionMessage
from schemas.task_graph import TaskUnit

MOST_LAYERS = 1_000_000
MOST_REVISION = 1_000_000_000
MOST_PLAN_TEXT = 14 * MOST_STAGES
"""Characters of a plan as people write it."""
_LAYERS = r" *([0-9]{1,6})(?:-([0-9]{1,6}))? *"
PLAN_PATTERN = f"^{_LAYERS}(,{_LAYERS})*$"
"""Of the text of a plan, for documents: `cuts_of` says what is wrong with a text, a schema does not."""

LayerNumber = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Cuts = tuple[tuple[LayerNumber, LayerNumber], ...]
"""(first, last) layer of each stage, the last exclusive."""


class LayerRange(Part):
    """Layers whose state goes over a link: to `peer`, or from it. `last_layer` is exclusive."""

    peer: Member
    first_layer: int
    last_layer: int


class RecutMessage(Message):
    """A message about the plan of revision `plan`, under an epoch of the job."""

    job: Token
    epoch: int
    plan: int = Field(ge=1)


class RecutPrepare(RecutMessage, wire="recut.prepare"):
    """SMO → MI: build what the plan of revision `plan` makes of you, beside what you train. Idempotent.

    `unit` is yours under that plan. You will be sent the layers that you `take`, and send those that you
    `give`. A higher revision takes the place of a lower one that is not in force.
    """

    unit: TaskUnit
    takes: tuple[LayerRange, ...] = ()
    gives: tuple[LayerRange, ...] = ()


class RecutSend(RecutMessage, wire="recut.send"):
    """SMO → MI: stream the state of the layers that you give, then each step as a redo, while you train.

    Answered once the receivers have caught up, or after a while, and then asked again.
    """


class RecutFill(VersionMessage, wire="recut.fill"):
    """SMO → MI, while training rests: complete what you have built with the state of `version`.

    Answered once all that you take has arrived and what you keep was copied.
    """

    plan: int = Field(ge=1)


class RecutReady(Message, wire="recut.ready"):
    """The answer to these three. `version` is what receivers, or you, have reached; −1: it is under way."""

    member: Member
    plan: int
    version: int = -1
    bytes: int = 0
    slow: bool = Field(False, description="a receiver does not keep up, and is sent nothing more")


class RecutSwitch(AttemptMessage, wire="recut.switch"):
    """SMO → MI: the plan is in force, by the job's record: it is yours from `attempt` on. Idempotent."""

    plan: int = Field(ge=1)
    fenced: tuple[Member, ...] = ()


class RecutDrop(RecutMessage, wire="recut.drop"):
    """SMO → MI: forget what you have built for this plan; the present one goes on. Idempotent."""


class RecutState(StrEnum):
    PREPARING = "preparing"  # members build and copy, while the present plan works
    DONE = "done"  # the plan is in force
    DROPPED = "dropped"  # nothing has changed; `why` says what stood in the way


class RecutRecord(Part):
    """One re-cut, in a job's record and in its events. Times are in seconds."""

    plan: int = Field(description="revision of the plan that it makes")
    by: str = Field(description="who wanted it")
    before: Cuts
    cuts: Cuts
    step: int = Field(description="the open step as it began; of one that is done, the first step under it")
    state: RecutState = RecutState.PREPARING
    why: str = ""
    moved_bytes: int = Field(0, ge=0, description="of the state that went over links, without redos")
    copy_s: float | None = Field(None, description="from the order to build until all had caught up")
    pause_s: float | None = Field(
        None, description="for which training rested; in the job's record, once it goes on"
    )


class RecutJob(Message, wire="job.recut"):
    """MG → SMO: cut the layers of a running job anew.

    Without `cuts` the planner chooses, by measured times. `revision` is that of the plan that whoever asks
    has seen: of another one it is refused. With `dry_run` nothing changes.
    """

    job: Token
    user: str
    cuts: Cuts | None = Field(None, max_length=MOST_STAGES)
    revision: int | None = Field(None, ge=0, le=MOST_REVISION)
    dry_run: bool = False


class RecutAnswer(Message, wire="job.recut.answer"):
    """What was begun, or would be. `step_ms` are what the planner expects of a step now and then."""

    job: Token
    plan: int = Field(description="revision of the plan that it makes")
    before: Cuts
    cuts: Cuts
    note: str
    moved_bytes: int = Field(0, description="as analysed, of the state that goes over links")
    step_ms: tuple[float, float] | None = None


def cuts_text(cuts: Cuts) -> str:
    """As people write it, with the last layer included: `0-3,4-7`."""
    return ",".join(f"{first}-{last - 1}" if last - first != 1 else f"{first}" for first, last in cuts)


def cuts_of(text: str) -> Cuts:
    """What people write, `0-3,4-7` or `0-6,7`, as cuts.

    Raises:
        BadInput: it is something else.
    """
    found = []
    for part in text.split(","):
        matched = re.fullmatch(_LAYERS, part)
        if matched is None:
            raise BadInput(
                f"plan {text[:80]!r}: {part.strip()[:40]!r} names no layers: write those of each stage, like "
                "0-3,4-7"
            )
        first = int(matched[1])
        found.append((first, int(matched[2] or first) + 1))
    if len(found) > MOST_STAGES:
        raise BadInput(f"the plan has {len(found):,} stages; a job has {MOST_STAGES:,} at most")
    return tuple(found)
