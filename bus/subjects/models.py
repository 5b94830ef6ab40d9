"""The model registry: requests to it, and its records of models, versions and moves of aliases."""

from __future__ import annotations

from bus.subject_row import Subject
from bus.subjects.table import AAM, MG, MODELS, RECORDS_BYTES
from schemas.errors import Ack
from schemas.models import commands, version

__all__ = [
    "ALIAS_MOVE",
    "APPROVE_MODEL",
    "EVALUATE_MODEL",
    "MODEL_KEYS",
    "MODEL_VERSION",
    "MOVE_ALIAS",
    "NAMED_MODEL",
    "REGISTER_MODEL",
    "REMOVE_MODEL",
    "RULE_MODEL",
]

REGISTER_MODEL = Subject(
    "register model",
    "model.command.register",
    commands.RegisterModel,
    MG,
    MODELS,
    "make a version of these weights",
    reply=commands.ModelRegistered,
    answer_bytes=RECORDS_BYTES,
)
MOVE_ALIAS = Subject(
    "move alias",
    "model.command.move",
    commands.MoveAlias,
    MG,
    MODELS,
    "an alias names another version",
    reply=version.AliasMove,
)
APPROVE_MODEL = Subject(
    "approve model",
    "model.command.approve",
    commands.ApproveModel,
    MG,
    MODELS,
    "a user approves a version",
    reply=version.ModelVersion,
    answer_bytes=RECORDS_BYTES,
)
EVALUATE_MODEL = Subject(
    "evaluate model",
    "model.command.evaluate",
    commands.EvaluateModel,
    MG,
    MODELS,
    "figures of a version",
    reply=version.ModelVersion,
    answer_bytes=RECORDS_BYTES,
)
REMOVE_MODEL = Subject(
    "remove model",
    "model.command.remove",
    commands.RemoveModel,
    MG,
    MODELS,
    "a version is not to be used any more",
    reply=Ack,
)
RULE_MODEL = Subject(
    "rule model",
    "model.command.rule",
    commands.RuleModel,
    MG,
    MODELS,
    "how many approvals an alias wants",
    reply=version.NamedModel,
)
MODEL_KEYS = Subject(
    "model keys",
    "model.query.keys",
    commands.ModelKeysQuery,
    MG,
    MODELS,
    "the keys that versions are signed with",
    reply=commands.ModelKeys,
)
NAMED_MODEL = Subject(
    "named model",
    "{name}",
    version.NamedModel,
    MODELS,
    MODELS | MG | AAM,
    "whose a model is, and the rules of its aliases",
    bucket="models",
)
MODEL_VERSION = Subject(
    "model version",
    "{name}.{version}",
    version.ModelVersion,
    MODELS,
    MODELS | MG,
    "versions of models; a new one is a compare-and-set",
    bucket="model_versions",
)
ALIAS_MOVE = Subject(
    "alias move",
    "{name}.{alias}.{number}",
    version.AliasMove,
    MODELS,
    MODELS | MG,
    "each move of an alias, written once: the next number is the compare-and-set",
    bucket="alias_moves",
)
