"""An instance's entries in its local store (draft §6.1): its configuration, its samples, its orders.

`workers.instance` calls it: it wraps order handlers, passes on samples and reports states. Each call only
appends to a queue (`workers.local_store.local_store`).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bus.subject_row import Subject
from bus.subjects import STEP_COMMIT
from schemas.base import Message
from schemas.checkpoint import CheckpointWait, CheckpointWritten
from schemas.cluster import InstanceStart
from schemas.data_plane import RouteTable
from schemas.envelope import Envelope, Sender
from schemas.errors import DmscError
from schemas.peer_copy import CopySend, CopyTo
from schemas.step import (
    Exported,
    ExportOrder,
    GroupForm,
    StateReady,
    StateRestore,
    StateSend,
    StateWait,
    StepAbort,
    StepApplied,
    StepCommit,
)
from schemas.store import StoreQuery, StoreRows
from schemas.telemetry import InstanceSample
from schemas.weights_digest import weights_sha256
from workers.local_store.local_store import LocalStore
from workers.local_store.store_schema import COLUMNS, COMMON

_SAMPLED = COLUMNS["metrics"].keys() - COMMON.keys() - {"links", "device"}
"""Fields of a sample that are recorded as they are."""

Order = Callable[[Any], Awaitable[Message]]


class StoreRecorder:
    """Records one incarnation's entries.

    Args:
        store: It may be one that keeps nothing.
        stage: The instance's stage.
        metrics_s: Least seconds between two recorded samples; those between them are not recorded.
    """

    def __init__(self, store: LocalStore, stage: int, *, metrics_s: float = 0.5) -> None:
        self.metrics_s = metrics_s
        self._store = store
        self._stage = stage
        self._step = 0
        self._last_sample_at = float("-inf")
        self._last_commit: tuple[int, int, int] | None = None

    # --- configuration, samples, events ---------------------------------------------------------------
    def begins(self, start: InstanceStart, **place: Any) -> None:
        """Records configuration, execution context and dependencies of this incarnation.

        Args:
            start: The order that started it.
            place: Its place: cluster, node, device, address, …
        """
        for key, value in {
            "job": start.spec.model_dump(mode="json"),
            "unit": start.unit.model_dump(mode="json"),
            "tags": start.unit.tags,
            "epoch": start.epoch,
            "stages": start.stages,
            "layer_count": start.layer_count,
            "code_digest": start.code_digest,
            "place": place,
        }.items():
            self._store.add("configuration", {"key": key, "value": json.dumps(value)})
        self._store.add("configuration", lambda: {"key": "dependencies", "value": json.dumps(dependencies())})
        self.event("state", "pending: it builds its part")

    def sample(self, sample: InstanceSample) -> None:
        """Records a published sample, at most one per `metrics_s`."""
        self._step = sample.step
        now = time.monotonic()
        if now - self._last_sample_at >= self.metrics_s:
            self._last_sample_at = now
            self._store.add("metrics", partial(_metrics, sample))

    def event(self, kind: str, text: str) -> None:
        """Records an event: a state, a broken link, new routes."""
        self._store.add("events", {"kind": kind, "step": self._step, "text": text})

    def routes(self, table: RouteTable | None) -> None:
        """Records a new route table, if it is for the stage to which this instance sends."""
        if table is not None and table.stage == self._stage + 1:
            weights = ", ".join(f"{entry.sid} {entry.weight:g}" for entry in table.entries)
            self.event("routes", f"stage {table.stage} revision {table.revision}: {weights} ({table.reason})")

    # --- orders ---------------------------------------------------------------------------------------
    def audited(self, row: Subject, handle: Order) -> Callable[[Any, Envelope], Awaitable[Message]]:
        """Wraps `handle` so that each order, its sender and its outcome are recorded."""

        async def obey(order: Any, envelope: Envelope) -> Message:
            began, outcome, reason = time.perf_counter(), "failed", "cut short"
            try:
                answer = await handle(order)
                outcome, reason = "obeyed", ""
            except DmscError as error:
                outcome, reason = "refused", f"{error.code}: {error.text}"
                self.event("refusal", f"{row.name} of {envelope.sender.name}: {error.text}")
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise
            finally:
                took_ms = (time.perf_counter() - began) * 1e3
                audit_row = partial(_audit_row, row, order, envelope.sender, outcome, reason, took_ms)
                self._store.add("audit", audit_row)
            self._record_effect(row, order, answer)
            return answer

        return obey

    def _record_effect(self, row: Subject, order: Any, answer: Message) -> None:
        """Records the effect of an obeyed order in the table that it belongs to."""
        if isinstance(order, StepCommit) and isinstance(answer, StepApplied) and row is STEP_COMMIT:
            self._record_commit(order, answer)
        elif isinstance(order, ExportOrder) and isinstance(answer, Exported):
            self._record_export(order, answer)
        elif isinstance(order, CheckpointWait) and isinstance(answer, CheckpointWritten):
            self._record_checkpoint(order, answer)
        elif (text := _describe(order, answer)) is not None:
            self.event(row.name, text)

    def _record_commit(self, order: StepCommit, answer: StepApplied) -> None:
        commit = (order.epoch, order.step, order.attempt)
        if commit == self._last_commit:  # a repeated order, obeyed once
            return
        self._last_commit = commit
        self._step = answer.version
        self._store.add("versions", partial(_version_row, order, answer))

    def _record_export(self, order: ExportOrder, answer: Exported) -> None:
        if order.after:
            return  # a further page of the same export
        complete = bool(answer.tensors) and not answer.more
        digest = weights_sha256(answer.tensors) if complete else None
        self._record_snapshot("export", order, answer, answer.url, order.shard, answer.bytes, digest)

    def _record_checkpoint(self, order: CheckpointWait, answer: CheckpointWritten) -> None:
        for file in answer.part.files:
            name = f"{answer.part.folder}/{file.name}"
            self._record_snapshot("checkpoint", order, answer, order.url, name, file.bytes, file.sha256)

    def _record_snapshot(
        self,
        kind: str,
        order: CheckpointWait | ExportOrder,
        answer: CheckpointWritten | Exported,
        url: str,
        name: str,
        size_bytes: int,
        sha256: str | None,
    ) -> None:
        row = {"kind": kind, "version": answer.version, "epoch": order.epoch, "url": url, "name": name}
        self._store.add("snapshots", {**row, "bytes": size_bytes, "sha256": sha256})

    # --- read -----------------------------------------------------------------------------------------
    async def read(self, query: StoreQuery, envelope: Envelope) -> StoreRows:
        """Serves `subjects.STORE_QUERY`; queries are not audited, since they change nothing."""
        return await self._store.query(query)


def dependencies() -> dict[str, str | None]:
    """Versions of software on which the training result may depend."""
    system = os.uname()
    return {
        "dmsc": _installed("dmsc"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": _installed("numpy"),
        "safetensors": _installed("safetensors"),
        "system": f"{system.sysname} {system.release} {system.machine}",
    }


def _installed(name: str) -> str | None:
    """A package's version; None if it is not installed or runs from a checkout."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _audit_row(
    row: Subject, order: Any, sender: Sender, outcome: str, reason: str, took_ms: float
) -> dict[str, Any]:
    return {
        "sender": sender.name,
        "sender_kind": sender.kind.value,
        "sender_incarnation": sender.incarnation,
        "what": row.name,
        "epoch": getattr(order, "epoch", None),
        "step": getattr(order, "step", getattr(order, "version", None)),
        "count": 1,
        "outcome": outcome,
        "reason": reason,
        "took_ms": took_ms,
    }


def _version_row(order: StepCommit, answer: StepApplied) -> dict[str, Any]:
    return {
        "version": answer.version,
        "epoch": order.epoch,
        "attempt": order.attempt,
        "generation": order.generation,
        "checksum": order.checksum,
        "action": order.action,
        "clip": order.clip,
    }


def _metrics(sample: InstanceSample) -> dict[str, Any]:
    device = sample.device
    return {
        **{name: getattr(sample, name) for name in _SAMPLED},
        "links": json.dumps([link.model_dump() for link in sample.links]),
        "device": None if device is None else device.model_dump_json(exclude_none=True),
    }


def _describe(order: Any, answer: Message) -> str | None:
    """An obeyed order that belongs to a recovery, in words; None for other orders."""
    if isinstance(order, StepAbort):
        fenced = ", ".join(f"{member.sid} {member.incarnation}" for member in order.fenced)
        return f"step {order.step} goes on as attempt {order.attempt}" + (
            f"; fenced: {fenced}" if fenced else ""
        )
    if isinstance(order, GroupForm):
        return f"generation {order.generation}: {', '.join(member.sid for member in order.members)}"
    if isinstance(order, StateSend) and isinstance(answer, StateReady):
        if answer.slow:
            return f"{order.to.sid} {order.to.incarnation} can't follow"
        if answer.version < 0:
            return None
        return f"version {answer.version} sent to {order.to.sid} {order.to.incarnation}, {answer.bytes} bytes"
    if isinstance(order, CopyTo):
        return f"kept at {order.holder.sid} {order.holder.incarnation}" if order.holder else "kept nowhere"
    if isinstance(order, CopySend):
        return f"version {order.version} of stage {order.stage} sent to {order.to.sid} {order.to.incarnation}"
    if isinstance(order, StateWait):
        return f"holds version {order.version}"
    if isinstance(order, StateRestore):
        return f"version {order.version} taken from {order.checkpoint or 'the seed'}"
    return None
