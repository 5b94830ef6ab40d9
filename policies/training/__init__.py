"""Training of modules from recorded runs (`dmsc policy train`, ADR-0100). Pure.

Each trainer reads examples from runs, learns a state that its module restores, and says how well that state
does on runs that it has not seen, beside the one that the module has now. The seed decides everything.

- `trainer`: `train`: which runs are held out, refusals, and the trained state.
- `outages`: lengths of outages, for `transience`.
- `arms`: what tilts of weights were worth, for `routing-bandit`.
- `device_failures`: signs of failing devices, for `device-risk`.
- `port_signs`: signs of a fabric's ports, for `port-faults`.
- `stage_hops`: hops between stages, for the network of `topology-scoring`.
"""

from __future__ import annotations

from typing import Any

from policies.training.arms import ArmTrainer
from policies.training.device_failures import DeviceFailureTrainer
from policies.training.outages import OutageTrainer
from policies.training.port_signs import PortSignTrainer
from policies.training.stage_hops import StageHopTrainer
from policies.training.trainer import Run, Trained, Trainer, train

TRAINERS: dict[str, type[Trainer[Any]]] = {
    "device-risk": DeviceFailureTrainer,
    "port-faults": PortSignTrainer,
    "routing-bandit": ArmTrainer,
    "topology-scoring": StageHopTrainer,
    "transience": OutageTrainer,
}
"""The modules that can be trained from records, by name."""

__all__ = ["TRAINERS", "Run", "Trained", "Trainer", "train"]
