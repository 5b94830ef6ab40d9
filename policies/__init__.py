"""Functional modules (draft §4.2): the kit for policies and the built-in ones.

A policy suggests, the orchestrator decides (ADR-0002). What a policy's author needs is here: `Policy` to
derive from, `JobView` to read, `InstanceStore` for tools of one's own. Running one is
`policies.module.service.FunctionalModule`.
"""

from __future__ import annotations

from policies.kit.inference import Inference, Inferred
from policies.kit.instance_store import InstanceStore
from policies.kit.policy import Policy, Suggestions
from policies.kit.store_reads import StoreRead
from policies.kit.view import InstanceView, JobView, OwnSuggestion
from schemas.former_names import keep_former_names

__all__ = [
    "Inference",
    "Inferred",
    "InstanceStore",
    "InstanceView",
    "JobView",
    "OwnSuggestion",
    "Policy",
    "StoreRead",
    "Suggestions",
]

keep_former_names()
