"""Who works on a batch, and what it is in OpenAI's shape. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        more["ended_at"] = now
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
                )
            )
    return made


def batch_view(record: BatchRecord, units: Iterable[BatchUnit]) -> OpenaiBatch:
    """The batch as OpenAI's clients know it; its counts are those of the committed units."""
    units = list(units)
    completed, failed = sum(each.completed for each in units), sum(each.failed for each in units)
    state, over = record.state, record.state in BATCH_OVER
    ended = {f"{state.value}_at": _whole(record.ended_at)} if over else {}
    has_output = over and any(each.output for each in units)
    has_errors = over and any(each.errors for each in units)
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
