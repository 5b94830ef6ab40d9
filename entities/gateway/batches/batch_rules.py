"""Who works on a batch, and what it is in OpenAI's shape. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from schemas.errors import IllegalTransition
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.batches import (
    BATCH_OVER,
    BATCH_TRANSITIONS,
    BatchCounts,
    BatchError,
    BatchErrors,
    BatchRecord,
    BatchState,
    BatchUnit,
    OpenaiBatch,
    OpenaiFile,
    StoredFile,
)

S = BatchState
_GONE = (InstanceState.FAULTED, InstanceState.GONE)


def is_forsaken(record: BatchRecord, registry: Mapping[str, ServiceRecord]) -> bool:
    """Whether the gateway that works on it is gone, so that another one takes it over."""
    if record.state in BATCH_OVER:
        return False
    worker = registry.get(record.gateway)
    return worker is None or worker.incarnation != record.incarnation or worker.state in _GONE


def only_ends(record: BatchRecord, now: float) -> bool:
    """Whether none of its requests is answered any more: it has no time left, or is about to end."""
    return record.state is not S.IN_PROGRESS or record.expires_at <= now


def next_batches(
    records: Iterable[BatchRecord],
    running: Collection[str],
    most: int,
    now: float,
    *,
    forsaken: Collection[str] = (),
    left: Mapping[str, float] = MappingProxyType({}),
) -> list[BatchRecord]:
    """Which batches a gateway begins, or takes over, now, so that at most `most` run.

    Those of the user who has the fewest running come first. Of these, one that gave its place back is behind
    all others, one whose gateway is gone before them, and else the oldest is first. One that only has to end
    takes no room.

    Args:
        records: The gateway's own batches whose services can be asked, those that run, and forsaken ones.
        running: Batches that run here.
        forsaken: Batches whose gateway is gone, and those taken over that have not begun yet.
        left: When a batch gave its place here back, since its requests could not begin.
    """
    everyone = sorted(records, key=lambda each: (each.created_at, each.batch))
    busy = Counter(each.user for each in everyone if each.batch in running)
    begun: list[BatchRecord] = []
    waiting: list[BatchRecord] = []
    for each in everyone:
        if each.batch not in running:
            (begun if only_ends(each, now) else waiting).append(each)
    for _ in range(most - len(running)):
        if not waiting:
            break
        first = min(
            waiting, key=lambda each: (busy[each.user], left.get(each.batch, 0.0), each.batch not in forsaken)
        )
        waiting.remove(first)
        busy[first.user] += 1
        begun.append(first)
    return begun


def moved(record: BatchRecord, state: BatchState, now: float, **more: Any) -> BatchRecord:
    """The record in another state, with the time at which it came there.

    Raises:
        IllegalTransition: it can't.
    """
    if state not in BATCH_TRANSITIONS[record.state]:
        raise IllegalTransition(f"batch {record.batch}: {record.state} to {state}")
    if state is S.CANCELLING:
        more["cancelling_at"] = now
    elif state is S.FINALIZING:
        more["finalizing_at"] = now
    else:
        more |= {"ended_at": now, "offsets": (), "firsts": ()}
    return record.model_copy(update={"state": state, **more})


def output_file(batch: str) -> str:
    """The id of the file with a batch's answers."""
    return f"file-{batch.removeprefix('batch_')}-output"


def error_file(batch: str) -> str:
    return f"file-{batch.removeprefix('batch_')}-errors"


def files_of(record: BatchRecord, units: Iterable[BatchUnit], now: float) -> list[StoredFile]:
    """The files of a batch's answers, as far as it has any."""
    units = list(units)
    made = []
    runs = _runs(each.unit for each in units)
    for part, file, size, has in (
        (
            "output",
            output_file(record.batch),
            sum(each.output_bytes for each in units),
            any(each.output for each in units),
        ),
        (
            "errors",
            error_file(record.batch),
            sum(each.error_bytes for each in units),
            any(each.errors for each in units),
        ),
    ):
        if has:
            made.append(
                StoredFile(
                    file=file,
                    user=record.user,
                    filename=f"{record.batch}_{part}.jsonl",
                    purpose="batch_output",
                    size_bytes=size,
                    created_at=now,
                    batch=record.batch,
                    part="output" if part == "output" else "errors",
                    units=runs,
                )
            )
    return made


def _runs(units: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers as runs: the first one and how many follow each other."""
    runs: list[tuple[int, int]] = []
    for unit in units:
        if runs and sum(runs[-1]) == unit:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((unit, 1))
    return tuple(runs)


def batch_view(record: BatchRecord, units: Iterable[BatchUnit] = ()) -> OpenaiBatch:
    """The batch as OpenAI's clients know it. `units`: those that are committed, of one that is not over."""
    units = list(units)
    completed = record.completed + sum(each.completed for each in units)
    failed = record.failed + sum(each.failed for each in units)
    state, over = record.state, record.state in BATCH_OVER
    ended = {f"{state.value}_at": _whole(record.ended_at)} if over else {}
    has_output, has_errors = over and completed > 0, over and failed > 0
    errors = (
        BatchErrors(data=(BatchError(code="batch_failed", message=record.error),)) if record.error else None
    )
    return OpenaiBatch(
        id=record.batch,
        endpoint=record.endpoint,
        model=record.model or None,
        errors=errors,
        input_file_id=record.input_file,
        completion_window=record.completion_window,
        status=state.value,
        output_file_id=output_file(record.batch) if has_output else None,
        error_file_id=error_file(record.batch) if has_errors else None,
        created_at=int(record.created_at),
        in_progress_at=int(record.created_at),
        expires_at=int(record.expires_at),
        finalizing_at=_whole(record.finalizing_at),
        cancelling_at=_whole(record.cancelling_at),
        request_counts=BatchCounts(total=record.lines, completed=completed, failed=failed),
        metadata=record.metadata or None,
        **ended,
    )


def file_view(file: StoredFile) -> OpenaiFile:
    return OpenaiFile(
        id=file.file,
        bytes=file.size_bytes,
        created_at=int(file.created_at),
        filename=file.filename,
        purpose=file.purpose,
    )


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)
