"""A stage's state on its way: newcomers, copies, checkpoints, weights; local stores; hops."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import BROKER, CLIENT, CORE, FM, MG, MI, REQUEST, SMO, row
from schemas import checkpoint, data_plane, files, peer_copy, step, store
from schemas.errors import Ack

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_WAIT",
    "COPY_SEND",
    "COPY_STATUS",
    "COPY_TO",
    "EXPORT",
    "NOTICE",
    "NOTICE_ANSWER",
    "PUBLISH_FILE",
    "STATE_RESTORE",
    "STATE_SEND",
    "STATE_WAIT",
    "STORE_QUERY",
]

STATE_SEND = row(
    "state send",
    "state.send.{job}.{sid}",
    step.StateSend,
    SMO,
    MI,
    REQUEST,
    "stream your state to a newcomer",
    reply=step.StateReady,
)
STATE_WAIT = row(
    "state wait",
    "state.wait.{job}.{sid}",
    step.StateWait,
    SMO,
    MI,
    REQUEST,
    "answer once you hold this version",
    reply=step.StateReady,
)
STATE_RESTORE = row(
    "state restore",
    "state.restore.{job}.{sid}",
    step.StateRestore,
    SMO,
    MI,
    REQUEST,
    "take this version from a checkpoint or the seed",
    reply=step.StateReady,
)
COPY_TO = row(
    "copy to",
    "state.keep.{job}.{sid}",
    peer_copy.CopyTo,
    SMO,
    MI,
    REQUEST,
    "keep a copy of your state at this peer",
    reply=Ack,
)
COPY_STATUS = row(
    "copy status",
    "state.held.{job}.{sid}",
    peer_copy.CopyStatus,
    SMO,
    MI,
    REQUEST,
    "which version does the copy that you hold reach?",
    reply=peer_copy.CopyHeld,
)
COPY_SEND = row(
    "copy send",
    "state.copy.{job}.{sid}",
    peer_copy.CopySend,
    SMO,
    MI,
    REQUEST,
    "send a newcomer the copy of its stage",
    reply=step.StateReady,
)
CHECKPOINT = row(
    "checkpoint",
    "state.checkpoint.{job}.{sid}",
    checkpoint.CheckpointOrder,
    SMO,
    MI,
    REQUEST,
    "copy your state, then write it",
    reply=checkpoint.CheckpointTaken,
)
CHECKPOINT_WAIT = row(
    "checkpoint wait",
    "state.written.{job}.{sid}",
    checkpoint.CheckpointWait,
    SMO,
    MI,
    REQUEST,
    "answer once your part of the checkpoint is stored",
    reply=checkpoint.CheckpointWritten,
)
PUBLISH_FILE = row(
    "publish file",
    "state.publish.{job}.{sid}",
    files.PublishFile,
    SMO,
    MI,
    REQUEST,
    "write a checkpoint's manifest, or the weights' list, below your job's artifacts",
    reply=Ack,
)
EXPORT = row(
    "export",
    "state.export.{job}.{sid}",
    step.ExportOrder,
    SMO,
    MI,
    REQUEST,
    "write your weights",
    reply=step.Exported,
)
STORE_QUERY = row(
    "store query",
    "store.query.{job}.{sid}",
    store.StoreQuery,
    SMO + MG + FM + CLIENT + BROKER,
    MI,
    REQUEST,
    "§6.3: rows of an instance's local store, read only",
    reply=store.StoreRows,
)
NOTICE = row(
    "notice",
    "data.notice.{job}.{sid}",
    data_plane.MicrobatchNotice,
    MI,
    MI + FM,
    CORE,
    "a hop: these tensors wait for you; repeated until answered",
    stream="STEPS",
    names=Names.RECEIVER,
)
NOTICE_ANSWER = row(
    "notice answer",
    "data.answer.{job}.{sid}",
    data_plane.NoticeAnswer,
    MI,
    MI,
    CORE,
    "accepted, held, stale, later",
    names=Names.RECEIVER,
)
