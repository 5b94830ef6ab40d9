"""The step transaction (docs/step-transaction.md)."""

from __future__ import annotations

from bus.subject_row import Subject
from bus.subjects.table import ACCOUNTANT, FM, MG, MI, SMO, STEP_BYTES
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

STEP_BEGIN = Subject(
    "step begin",
    "step.begin.{job}.{gateway}",
    step.StepBegin,
    SMO,
    MG,
    "dispatch these microbatches",
    reply=Ack,
)
STEP_DISPATCH = Subject(
    "step dispatch",
    "step.dispatch.{job}.{sid}",
    step.MicrobatchDispatch,
    MG,
    MI,
    "produce these microbatches and send them on",
    reply=Ack,
)
STEP_CLAIM = Subject(
    "step claim",
    "step.claim.{job}.{sid}",
    step.MicrobatchClaim,
    MI,
    SMO | MG | FM | ACCOUNTANT,
    "this microbatch is in my sum",
    stream="STEPS",
)
STEP_STATUS = Subject(
    "step status",
    "step.status.{job}.{sid}",
    step.StepStatus,
    SMO,
    MI,
    "what do you hold of this step?",
    reply=step.StepStatusReply,
    answer_bytes=STEP_BYTES,
)
GROUP_FORM = Subject(
    "group form",
    "step.group.{job}.{sid}",
    step.GroupForm,
    SMO,
    MI,
    "build the reduction group of this generation",
    reply=step.GroupFormed,
)
STEP_PREPARE = Subject(
    "step prepare",
    "step.prepare.{job}.{sid}",
    step.StepPrepare,
    SMO,
    MI,
    "all-reduce and vote",
    reply=step.StepVote,
)
STEP_DECISION = Subject(
    "step decision", "{job}", step.StepDecision, SMO, SMO, "the commit point", bucket="steps"
)
STEP_COMMIT = Subject(
    "step commit",
    "step.commit.{job}.{sid}",
    step.StepCommit,
    SMO,
    MI,
    "apply the decision",
    reply=step.StepApplied,
)
STEP_ABORT = Subject(
    "step abort",
    "step.abort.{job}.{sid}",
    step.StepAbort,
    SMO,
    MI,
    "forget this step below this attempt",
    reply=step.StepAborted,
)
STEP_FENCE = Subject(
    "step fence",
    "step.fence.{job}.{sid}",
    step.StepFence,
    SMO,
    MI,
    "these incarnations count for nothing; what do you hold?",
    reply=step.StepFenced,
    answer_bytes=STEP_BYTES,
)
STEP_ASSIGN = Subject(
    "step assign",
    "step.assign.{job}.{sid}",
    step.StepAssign,
    SMO,
    MI,
    "mended paths of a lost owner's microbatches",
    reply=Ack,
)
ADOPT = Subject(
    "adopt",
    "step.adopt.{job}.{sid}",
    step.Adopt,
    SMO,
    MI,
    "a new orchestrator leads; where are you?",
    reply=step.Adopted,
)
