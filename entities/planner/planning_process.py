"""Asks a process of its own for a plan, so that nobody's loop waits for a search (ADR-0071).

The process lives for one request. If it dies or exceeds its deadline, the plan is the one made at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from entities.planner.abandoned_work import abandoned
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest, SearchFailed

_P = ParamSpec("_P")
_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """`deadline_s`: for a search; longer gives larger jobs a better plan, and has them start later.

    `program`: the module that is run. That of `dmsc` has a simulator as judge, which this package may not
    import.
    """

    deadline_s: float = 30.0
    program: str = "entities.planner"


_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planning")


async def beside_the_loop(work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
    """What `work` returns, computed on the one thread of this process that plans.

    A loop that wants its turn of the interpreter competes with one planning thread, and not with one for each
    job: with three of them it came round after 30 ms. If it is cancelled, the work ends at its next
    `stop_if_abandoned`, so that others need not wait for it.
    """
    over, context = threading.Event(), contextvars.copy_context()
    context.run(abandoned.set, over)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            _thread, lambda: context.run(work, *args, **named)
        )
    except asyncio.CancelledError:
        over.set()
        raise


async def searched(request: PlanRequest, config: PlanningConfig = PlanningConfig()) -> PlanAnswer:
    """The plan by a process, or the one made at once if that dies or is late.

    Raises:
        NoPlan: there is none.
        SearchFailed: there may be one: the process did not start, died, or was late, and at once there is
            none.
    """
    text = await beside_the_loop(request.to_json)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            config.program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
    except OSError as error:
        why = f"the search's process does not start: {error.strerror or error}"
        return await beside_the_loop(_at_once, request, why)
    try:
        async with asyncio.timeout(config.deadline_s):
            written, complaint = await process.communicate(text.encode())
    except TimeoutError:
        return await beside_the_loop(_at_once, request, f"the search exceeded its {config.deadline_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode or not written:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2][:200]
        how = f"code {process.returncode}{f': {last}' if last else ''}"
        return await beside_the_loop(_at_once, request, f"the search's process ended with {how}")
    try:
        answer = await beside_the_loop(_read, written)
    except (ValueError, LookupError, TypeError) as error:
        why = f"the answer of the search's process can't be read: {error}"
        return await beside_the_loop(_at_once, request, why)
    if isinstance(answer, NoPlan):
        raise answer
    return answer


def _read(written: bytes) -> PlanAnswer | NoPlan:
    """What the process wrote.

    Raises:
        ValueError, LookupError, TypeError: it is no answer.
    """
    body = written.decode()
    if body.startswith('{"refused"'):
        refusal = json.loads(body)
        return NoPlan(refusal["refused"], never=refusal["never"])
    return PlanAnswer.from_json(body)


async def searched_with_less(request: PlanRequest, config: PlanningConfig = PlanningConfig()) -> PlanAnswer:
    """As `searched`; where not all that windows may hold fits, with memory for what is certainly needed.

    Raises:
        NoPlan: not even that fits.
    """
    try:
        return await searched(request, config)
    except NoPlan:
        return await searched(request.relaxed(), config)


def _at_once(request: PlanRequest, why: str) -> PlanAnswer:
    try:
        answer = plan_at_once(request)
    except NoPlan as refused:
        raise SearchFailed(f"{refused} ({why})", never=False, needs_bytes=refused.needs_bytes) from None
    return replace(answer, reason=f"{answer.reason} (planned at once: {why})")


def _environment() -> dict[str, str]:
    """The process finds the product where this one did, and one thread is enough for it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
