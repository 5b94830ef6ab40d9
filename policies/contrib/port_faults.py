"""Which node hangs at a faulty port of the fabric: `fault_signatures`, fed live by the fabric's monitoring.

The monitoring posts one observation per port and sampling (`POST /v1/observations`): `what: port`,
`about: DEVICE/PORT`, values `received` and `sent` (packets per second) and `carrier` (changes since the
sampling before), and in the label `node` the SID of the agent of the node at that port, if there is one.

A fault of an instance behind a port that has lost its link is answered with a replacement elsewhere; one
while the whole fabric loses traffic, or while its port has just come back, by patience. Without a fault, what
runs behind a lost port is avoided where its stage has others. The last minutes come again after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from policies.contrib.fault_signatures import (
    RECENT,
    USUAL,
    FaultModel,
    FaultSignature,
    Window,
)
from policies.contrib.logistic import Logistic
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.names import agent_name
from schemas.observation import Observation
from schemas.policy import PolicySuggestion

KEPT, MOST_PORTS = 64, 4096
"""Samplings that are kept per port; ports of all sources, beyond which new ones are ignored."""
LOST = (FaultSignature.LINK_DOWN, FaultSignature.SESSION_LOST)
OF_FABRIC = (FaultSignature.TRAFFIC_LOST, FaultSignature.REHASHED)

LEARNT = FaultModel(
    port=Logistic(
        mean=np.array([0.418145, 0.162502, 0.011656, 0.000187, 0.000196, 0.000082]),
        deviation=np.array([0.629464, 0.468862, 0.028161, 0.01182, 0.014009, 0.009043]),
        weights=np.array([0.06138, 0.257309, 0.370434, 1.570506, 5.045956, 1.904482, -6.70207]),
    ),
    threshold=3.17883,
)
"""`python -m benchmarks.train_port_faults` prints these figures (data: `docs/policies-built-in.md`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortFault:
    """A finding: the fault, the port (`DEVICE/PORT`), the agent of the node at it, and how sure that is."""

    fault: FaultSignature
    port: str
    node: str
    probability: float
    reason: str


class PortModelState(TypedDict):
    """A model of ports as plain data."""

    mean: list[float]
    deviation: list[float]
    weights: list[float]
    threshold: float


class PortFaultsState(TypedDict):
    """What it learnt; `model` None: the model that it comes with."""

    model: PortModelState | None


_STATE = TypeAdapter(PortFaultsState)


def as_data(model: FaultModel) -> PortModelState:
    """The model as plain data; `of_data` gives the same model again."""
    port = model.port
    return PortModelState(
        mean=port.mean.tolist(),
        deviation=port.deviation.tolist(),
        weights=port.weights.tolist(),
        threshold=float(model.threshold),
    )


def of_data(state: PortModelState) -> FaultModel:
    """The model of `as_data`. Raises `ValueError` if it has another form."""
    mean, deviation, weights = (np.array(state[name]) for name in ("mean", "deviation", "weights"))
    if not len(mean) == len(deviation) == len(weights) - 1 == len(LEARNT.port.mean) or min(deviation) <= 0:
        raise ValueError("no model of ports: its figures do not fit together")
    return FaultModel(
        port=Logistic(mean=mean, deviation=deviation, weights=weights), threshold=state["threshold"]
    )


@dataclass(slots=True)
class _PortHistory:
    """The last samplings of one port: `(received, sent, carrier)`, oldest first."""

    node: str = ""
    at: float = float("-inf")
    rows: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))


class PortFaults(Policy):
    """Says what a fabric's ports have to do with a fault."""

    name: ClassVar[str] = "port-faults"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 2.0
    state_version: ClassVar[int] = 1
    valid_s: ClassVar[float] = 30.0
    fresh_s: ClassVar[float] = 60.0
    """A port that was not sampled for so long is left out."""

    def __init__(self, model: FaultModel = LEARNT) -> None:
        self._model = self._usual = model
        self._own: PortModelState | None = None
        self._ports: dict[str, dict[str, _PortHistory]] = {}

    def learnt_state(self) -> PortFaultsState:
        """The model, if it is not the one that it comes with; samplings of ports come again by the stream."""
        return PortFaultsState(model=self._own)

    def restore(self, state: Any) -> None:
        own = _STATE.validate_python(state)["model"]
        self._model = self._usual if own is None else of_data(own)
        self._own = own

    def on_observation(self, observation: Observation, at: float) -> None:
        values = observation.values
        if (
            observation.what != "port"
            or observation.about is None
            or not {"received", "sent"} <= values.keys()
        ):
            return
        ports = self._ports.setdefault(observation.source, {})
        if observation.about not in ports and sum(map(len, self._ports.values())) >= MOST_PORTS:
            return
        port = ports.setdefault(observation.about, _PortHistory())
        port.node = observation.labels.get("node", port.node)
        port.at = at
        port.rows.append((values["received"], values["sent"], values.get("carrier", 0.0)))

    def findings(self, now: float) -> list[PortFault]:
        """What the last samplings of each source show, the surest first."""
        found = [finding for ports in self._ports.values() for finding in self._of_source(ports, now)]
        return sorted(found, key=lambda finding: (-finding.probability, finding.port))

    def _of_source(self, ports: Mapping[str, _PortHistory], now: float) -> list[PortFault]:
        names = [name for name, port in sorted(ports.items()) if now - port.at <= self.fresh_s]
        length = min((len(ports[name].rows) for name in names), default=0)
        if length < USUAL + RECENT:
            return []
        # (ports, times, 3) → (times, ports, 3): the last samplings that all ports have
        table = np.array([list(ports[name].rows)[-length:] for name in names]).transpose(1, 0, 2)
        devices = tuple(name.partition("/")[0] for name in names)
        window = Window(packets=table[..., :2], carrier=table[..., 2], devices=devices)
        return [
            PortFault(
                fault=one.fault,
                port=names[one.port],
                node=ports[names[one.port]].node,
                probability=min(one.probability, 0.99),
                reason=f"{names[one.port]}: {one.fault}, {one.reason}",
            )
            for one in self._model.diagnose(window)
        ]

    def on_fault(self, fault: FaultQuestion, view: JobView) -> FaultAnswer | None:
        agent = fault.agent or agent_name(fault.cluster, fault.node)
        for finding in self.findings(fault.at):
            why, sure = finding.reason, finding.probability
            if finding.node == agent and finding.fault in LOST:
                return self.replace(fault, avoid=(agent,), reason=why, confidence=sure)
            if fault.kind not in ("link", "unreachable") or fault.lost:
                continue
            if finding.node == agent and finding.fault is FaultSignature.LINK_UP:
                return self.retry(fault, reason=why, confidence=sure)
            if finding.fault in OF_FABRIC and fault.usual == "replace":
                return self.wait(fault, fault.most_wait_s, reason=why, confidence=sure)
        return None

    def decide(self, view: JobView, now: float) -> Suggestions:
        lost = {finding.node: finding for finding in self.findings(now) if finding.fault in LOST}
        suggestions: list[PolicySuggestion] = []
        for stage in view.stages:
            instances = view.stage(stage, now)
            behind = [one for one in instances if agent_name(one.cluster, one.node) in lost]
            if len(behind) == len(instances):
                continue
            for one in behind:
                if not view.is_due(f"instance {one.sid}", now, self.valid_s / 2):
                    continue
                finding = lost[agent_name(one.cluster, one.node)]
                suggestions.append(
                    self.avoid(
                        view,
                        one.sid,
                        reason=finding.reason,
                        confidence=finding.probability,
                        valid_s=self.valid_s,
                    )
                )
        return suggestions
