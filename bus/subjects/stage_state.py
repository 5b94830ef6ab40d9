"""A stage's state on its way: newcomers, copies, checkpoints, weights; local stores; hops."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import BROKER, CLIENT, FM, MG, MI, SMO
from schemas import checkpoint, data_blocks, data_plane, files, peer_copy, recut, step, store
from schemas.errors import Ack

__all__ = [
    "BLOCKS_KEPT",
    "BLOCK_SEND",
    "CHECKPOINT",
    "CHECKPOINT_WAIT",
    "COPY_SEND",
    "COPY_STATUS",
    "COPY_TO",
    "EXPORT",
    "NOTICE",
    "NOTICE_ANSWER",
    "PUBLISH_FILE",
    "RECUT_DROP",
    "RECUT_FILL",
    "RECUT_PREPARE",
    "RECUT_SEND",
    "RECUT_SWITCH",
    "STATE_RESTORE",
    "STATE_SEND",
    "STATE_WAIT",
    "STORE_QUERY",
]

STATE_SEND = Subject(
    "state send",
    "state.send.{job}.{sid}",
    step.StateSend,
    SMO,
    MI,
    "stream your state to a newcomer",
    reply=step.StateReady,
)
STATE_WAIT = Subject(
    "state wait",
    "state.wait.{job}.{sid}",
    step.StateWait,
    SMO,
    MI,
    "answer once you hold this version",
    reply=step.StateReady,
)
STATE_RESTORE = Subject(
    "state restore",
    "state.restore.{job}.{sid}",
    step.StateRestore,
    SMO,
    MI,
    "take this version from a checkpoint or the seed",
    reply=step.StateReady,
)
COPY_TO = Subject(
    "copy to",
    "state.keep.{job}.{sid}",
    peer_copy.CopyTo,
    SMO,
    MI,
    "keep a copy of your state at this peer",
    reply=Ack,
)
COPY_STATUS = Subject(
    "copy status",
    "state.held.{job}.{sid}",
    peer_copy.CopyStatus,
    SMO,
    MI,
    "which version does the copy that you hold reach?",
    reply=peer_copy.CopyHeld,
)
COPY_SEND = Subject(
    "copy send",
    "state.copy.{job}.{sid}",
    peer_copy.CopySend,
    SMO,
    MI,
    "send a newcomer the copy of its stage",
    reply=step.StateReady,
)
CHECKPOINT = Subject(
    "checkpoint",
    "state.checkpoint.{job}.{sid}",
    checkpoint.CheckpointOrder,
    SMO,
    MI,
    "copy your state, then write it",
    reply=checkpoint.CheckpointTaken,
)
CHECKPOINT_WAIT = Subject(
    "checkpoint wait",
    "state.written.{job}.{sid}",
    checkpoint.CheckpointWait,
    SMO,
    MI,
    "answer once your part of the checkpoint is stored",
    reply=checkpoint.CheckpointWritten,
)
PUBLISH_FILE = Subject(
    "publish file",
    "state.publish.{job}.{sid}",
    files.PublishFile,
    SMO,
    MI,
    "write a checkpoint's manifest, or the weights' list, below your job's artifacts",
    reply=Ack,
)
EXPORT = Subject(
    "export",
    "state.export.{job}.{sid}",
    step.ExportOrder,
    SMO,
    MI,
    "write your weights",
    reply=step.Exported,
)
RECUT_PREPARE = Subject(
    "recut prepare",
    "recut.prepare.{job}.{sid}",
    recut.RecutPrepare,
    SMO,
    MI,
    "build what this plan makes of you, beside what you train",
    reply=Ack,
)
RECUT_SEND = Subject(
    "recut send",
    "recut.send.{job}.{sid}",
    recut.RecutSend,
    SMO,
    MI,
    "stream the layers that you give by this plan",
    reply=recut.RecutReady,
)
RECUT_FILL = Subject(
    "recut fill",
    "recut.fill.{job}.{sid}",
    recut.RecutFill,
    SMO,
    MI,
    "complete what you have built with the state of this version",
    reply=recut.RecutReady,
)
RECUT_SWITCH = Subject(
    "recut switch",
    "recut.switch.{job}.{sid}",
    recut.RecutSwitch,
    SMO,
    MI,
    "this plan is in force: go over to its layers",
    reply=recut.RecutReady,
)
RECUT_DROP = Subject(
    "recut drop",
    "recut.drop.{job}.{sid}",
    recut.RecutDrop,
    SMO,
    MI,
    "forget what you have built for this plan",
    reply=Ack,
)
STORE_QUERY = Subject(
    "store query",
    "store.query.{job}.{sid}",
    store.StoreQuery,
    SMO | MG | FM | CLIENT | BROKER,
    MI,
    "§6.3: rows of an instance's local store, read only",
    reply=store.StoreRows,
)
NOTICE = Subject(
    "notice",
    "data.notice.{job}.{sid}",
    data_plane.MicrobatchNotice,
    MI,
    MI | FM,
    "a hop: these tensors wait for you; repeated until answered",
    stream="STEPS",
    names=Names.RECEIVER,
)
NOTICE_ANSWER = Subject(
    "notice answer",
    "data.answer.{job}.{sid}",
    data_plane.NoticeAnswer,
    MI,
    MI,
    "accepted, held, stale, later",
    names=Names.RECEIVER,
)
BLOCKS_KEPT = Subject(
    "blocks kept",
    "data.blocks.{job}.{sid}",
    data_blocks.BlocksKept,
    MI,
    MI,
    "these blocks of remote data lie in my node's cache",
)
BLOCK_SEND = Subject(
    "block send",
    "data.block.{job}.{sid}",
    data_blocks.BlockSend,
    MI,
    MI,
    "send me a block that your node keeps",
    reply=Ack,
)
