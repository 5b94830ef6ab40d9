"""Faults (draft §4.4(5), §5.5): reported by MG or SR, located by the SMO with SRD and MIC."""

from __future__ import annotations

from typing import Literal

from schemas.base import Message, Token


class LinkFault(Message, wire="fault.link"):
    """MI → SR of its cluster: a neighbour's link broke. A hint; the orchestrator alone decides."""

    job: Token
    reporter: Token
    peer: Token
    peer_incarnation: Token
    text: str


class FaultReport(Message, wire="fault.report"):
    """MG or SR → SMO. `evidence` says what was seen."""

    reporter: Token
    job: Token | None
    sid: Token
    incarnation: Token
    kind: Literal["instance", "link", "node", "request"]
    evidence: str


class FaultVerdict(Message, wire="fault.verdict"):
    """What the SMO found with SRD and MIC, and what it does about it; on the stream `FAULTS`."""

    job: Token | None
    sid: Token
    incarnation: Token
    verdict: Literal["transient", "structural", "unfounded"]
    scope: Literal["none", "instance", "node"]
    action: str
    reason: str
