"""Trains the model of `port-faults`: which signs of a fabric's port come with a fault behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.contrib.fault_signatures import RECENT, USUAL, FaultModel, Window, signatures
from policies.contrib.logistic import fit_logistic
from policies.contrib.port_faults import KEPT, LEARNT, PortFaults, as_data, of_data
from policies.training.trainer import Run, Trainer
from schemas.fault import FaultVerdict
from schemas.names import agent_name
from schemas.observation import Observation
from schemas.telemetry import InstanceSample

LEAST_FAULTS = 4
"""Ports with, and ports without, a fault behind them."""
EVERY = 10
"""Of ports without a sign, each of this many samplings is an example: they are all alike."""


class PortSigns(NamedTuple):
    """The features of a port in a sampling (`Signatures.table`), and whether the node at it had a fault."""

    features: tuple[float, ...]
    failed: bool


class PortSignTrainer(Trainer[PortSigns]):
    """Examples are ports in samplings; the loss is the mean squared error of the probability (Brier).

    A port counts as at fault if an instance of the node at it had a fault, not an unfounded one, within
    `within_s` seconds of the sampling.
    """

    policy = PortFaults
    what: ClassVar[str] = "samplings of ports"
    least: ClassVar[int] = 60
    unit: ClassVar[str] = "Brier score"

    def __init__(self, within_s: float = 30.0) -> None:
        self._within_s = within_s

    def examples(self, run: Run) -> list[PortSigns]:
        agents: dict[str, str] = {}
        faults: dict[str, list[float]] = {}
        found: list[tuple[str, float, tuple[float, ...]]] = []
        ports: dict[tuple[str, str], deque[tuple[float, float, float]]] = {}
        nodes: dict[tuple[str, str], str] = {}
        seen: dict[str, set[tuple[str, str]]] = {}
        for event in run.events:
            message = event.message
            if isinstance(message, InstanceSample):
                agents[message.sid] = agent_name(message.cluster, message.node)
            elif isinstance(message, FaultVerdict) and message.verdict != "unfounded":
                faults.setdefault(agents.get(message.sid, ""), []).append(event.at)
            elif isinstance(message, Observation) and message.what == "port" and message.about is not None:
                key = (message.source, message.about)
                values = message.values
                if not {"received", "sent"} <= values.keys():
                    continue
                if key in seen.setdefault(message.source, set()):  # a sampling is whole: the next one begins
                    found += _sampling(message.source, ports, nodes, event.at)
                    seen[message.source].clear()
                seen[message.source].add(key)
                row = (values["received"], values["sent"], values.get("carrier", 0.0))
                ports.setdefault(key, deque(maxlen=KEPT)).append(row)
                nodes[key] = message.labels.get("node", nodes.get(key, ""))
        return [
            PortSigns(features, any(abs(at - fault) <= self._within_s for fault in faults.get(node, ())))
            for node, at, features in found
        ]

    def learn(self, examples: Sequence[PortSigns], now: Any, rng: np.random.Generator) -> Any:
        truth = np.array([one.failed for one in examples])
        if min(truth.sum(), (~truth).sum()) < LEAST_FAULTS:
            raise ValueError(
                f"{truth.sum()} of {len(truth)} ports had a fault behind them; it takes {LEAST_FAULTS} of "
                "each kind"
            )
        table = np.array([one.features for one in examples])
        if not np.isfinite(table).all():
            raise ValueError("a sampling that is not finite")
        model = FaultModel(port=fit_logistic(table, truth), threshold=_model(now).threshold)
        return {"model": as_data(model)}

    def loss(self, state: Any, examples: Sequence[PortSigns]) -> float:
        chance = _model(state).port.probability(np.array([one.features for one in examples]))
        return float(np.mean((chance - np.array([one.failed for one in examples])) ** 2))


def _model(state: Any) -> FaultModel:
    return LEARNT if state["model"] is None else of_data(state["model"])


def _sampling(
    source: str,
    ports: dict[tuple[str, str], deque[tuple[float, float, float]]],
    nodes: dict[tuple[str, str], str],
    at: float,
) -> list[tuple[str, float, tuple[float, ...]]]:
    """Node, time and features of a source's ports that lead to a node, once there are enough samplings."""
    names = sorted(port for port in ports if port[0] == source)
    length = min(len(ports[name]) for name in names)
    if length < USUAL + RECENT:
        return []
    table = np.array([list(ports[name])[-length:] for name in names]).transpose(1, 0, 2)
    devices = tuple(about.partition("/")[0] for _, about in names)
    signs = signatures(Window(packets=table[..., :2], carrier=table[..., 2], devices=devices))
    rows = signs.table()
    return [
        (nodes[name], at, tuple(float(value) for value in rows[index]))
        for index, name in enumerate(names)
        if nodes[name] and (signs.suspect[index] or (length + index) % EVERY == 0)
    ]
