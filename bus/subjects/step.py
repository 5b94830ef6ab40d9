"""The step transaction (docs/step-transaction.md)."""

from __future__ import annotations

from bus.subjects.table import CORE, FM, KV, MG, MI, REQUEST, SMO, STEP_BYTES, row
from schemas import step
from schemas.errors import Ack

__all__ = [
    "ADOPT",
    "GROUP_FORM",
    "STEP_ABORT",
    "STEP_ASSIGN",
    "STEP_BEGIN",
    "STEP_CLAIM",
    "STEP_COMMIT",
    "STEP_DECISION",
    "STEP_DISPATCH",
    "STEP_FENCE",
    "STEP_PREPARE",
    "STEP_STATUS",
]

STEP_BEGIN = row(
    "step begin",
    "step.begin.{job}.{gateway}",
    step.StepBegin,
    SMO,
    MG,
    REQUEST,
    "dispatch these microbatches",
    reply=Ack,
)
STEP_DISPATCH = row(
    "step dispatch",
    "step.dispatch.{job}.{sid}",
    step.MicrobatchDispatch,
    MG,
    MI,
    REQUEST,
    "produce these microbatches and send them on",
    reply=Ack,
)
STEP_CLAIM = row(
    "step claim",
    "step.claim.{job}.{sid}",
    step.MicrobatchClaim,
    MI,
    SMO + MG + FM,
    CORE,
    "this microbatch is in my sum",
    stream="STEPS",
)
STEP_STATUS = row(
    "step status",
    "step.status.{job}.{sid}",
    step.StepStatus,
    SMO,
    MI,
    REQUEST,
    "what do you hold of this step?",
    reply=step.StepStatusReply,
    answer_bytes=STEP_BYTES,
)
GROUP_FORM = row(
    "group form",
    "step.group.{job}.{sid}",
    step.GroupForm,
    SMO,
    MI,
    REQUEST,
    "build the reduction group of this generation",
    reply=step.GroupFormed,
)
STEP_PREPARE = row(
    "step prepare",
    "step.prepare.{job}.{sid}",
    step.StepPrepare,
    SMO,
    MI,
    REQUEST,
    "all-reduce and vote",
    reply=step.StepVote,
)
STEP_DECISION = row(
    "step decision", "{job}", step.StepDecision, SMO, SMO, KV, "the commit point", bucket="steps"
)
STEP_COMMIT = row(
    "step commit",
    "step.commit.{job}.{sid}",
    step.StepCommit,
    SMO,
    MI,
    REQUEST,
    "apply the decision",
    reply=step.StepApplied,
)
STEP_ABORT = row(
    "step abort",
    "step.abort.{job}.{sid}",
    step.StepAbort,
    SMO,
    MI,
    REQUEST,
    "forget this step below this attempt",
    reply=step.StepAborted,
)
STEP_FENCE = row(
    "step fence",
    "step.fence.{job}.{sid}",
    step.StepFence,
    SMO,
    MI,
    REQUEST,
    "these incarnations count for nothing; what do you hold?",
    reply=step.StepFenced,
    answer_bytes=STEP_BYTES,
)
STEP_ASSIGN = row(
    "step assign",
    "step.assign.{job}.{sid}",
    step.StepAssign,
    SMO,
    MI,
    REQUEST,
    "mended paths of a lost owner's microbatches",
    reply=Ack,
)
ADOPT = row(
    "adopt",
    "step.adopt.{job}.{sid}",
    step.Adopt,
    SMO,
    MI,
    REQUEST,
    "a new orchestrator leads; where are you?",
    reply=step.Adopted,
)
