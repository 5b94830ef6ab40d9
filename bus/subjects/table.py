"""The names with which the rows of the table are written: who sends and receives, and sizes of answers."""

from __future__ import annotations

from bus.subject_row import Delivery
from schemas.envelope import EntityKind as K

RECORDS_BYTES = 8 << 20
"""Most bytes of an answer with whole records of the control plane: as many as a message may have."""
STEP_BYTES = 2 << 20
"""Most bytes of an account of a step: 4,096 microbatches fit, with long names."""

SRD, MG, AAM, SR, SMO, MIC, MI, FM, CLIENT, BROKER, ACCOUNTANT, MODELS, PROVISIONER = (
    frozenset({K.SERVICE_REGISTRY}),
    frozenset({K.GATEWAY}),
    frozenset({K.AUTHORIZER}),
    frozenset({K.ROUTER}),
    frozenset({K.ORCHESTRATOR}),
    frozenset({K.CLUSTER}),
    frozenset({K.INSTANCE}),
    frozenset({K.FUNCTIONAL_MODULE}),
    frozenset({K.CLIENT}),
    frozenset({K.BROKER}),
    frozenset({K.ACCOUNTANT}),
    frozenset({K.MODEL_REGISTRY}),
    frozenset({K.PROVISIONER}),
)
ALL = frozenset(K)
STREAM = Delivery.STREAM
