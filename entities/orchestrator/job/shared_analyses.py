"""What the analysis of a model found, for all members of an array whose models are the same (ADR-0087)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from schemas.errors import BadJob, BadModel
from schemas.job import JobSpec
from schemas.task_graph import ModelTopology

MOST_KEPT = 128
NO_MATTER: dict[str, Any] = {
    "name": True,
    "queue": True,
    "recovery": True,
    "sample": True,
    "training": {"seed": True, "schedule": True, "clip_norm": True, "optimizer": {"lr", "weight_decay"}},
}
"""What of the job file changes neither layers nor their costs. Momentum does: it takes memory."""


def analysis_key(array: str, spec: JobSpec) -> str:
    """Equal for members of an array of which one analysis is enough."""
    document = spec.model_dump(mode="json", exclude=NO_MATTER)
    return f"{array} {hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()}"


class SharedAnalyses:
    """Has each model analysed once; whoever needs the same meanwhile waits for it."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, asyncio.Future[ModelTopology]] = OrderedDict()

    async def of(self, key: str, analyse: Callable[[], Awaitable[ModelTopology]]) -> ModelTopology:
        """The topology: an earlier one, or what `analyse` finds.

        Raises:
            BadModel, BadJob: the model can't be analysed, whoever asks.
            Unavailable: of the caller's own attempt; others try again.
        """
        while (known := self._found.get(key)) is not None:
            await asyncio.wait([known])
            if not known.cancelled():
                return known.result()
        known = self._found[key] = asyncio.get_running_loop().create_future()
        try:
            topology = await analyse()
        except (BadModel, BadJob) as error:
            known.set_exception(error)
            known.exception()  # seen, even if nobody else asks
            raise
        except BaseException:
            known.cancel()
            self._found.pop(key, None)
            raise
        known.set_result(topology)
        while len(self._found) > MOST_KEPT:
            self._found.popitem(last=False)
        return topology
