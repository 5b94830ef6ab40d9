"""A model whose every pass asks at a gate whether it may go on; the numbers are the same with and without.

The gate is a Unix socket (`pass_gates.Gates` at the other end); where nobody listens, the pass goes on at
once. A pass says which process it is in, its direction, and the seed that its layer drew from, which names
step and microbatch (`workers.compute.model.layer_seed`).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 256

_connections: dict[tuple[int, str], socket.socket | None] = {}


def gated(gate: str, width: int = 16) -> nn.Sequential:
    """Three layers: wherever the model is cut, each stage has at least one of them."""
    return nn.Sequential(
        Gated(nn.Embedding(VOCABULARY, width), gate),
        Gated(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)), gate),
        Gated(nn.Linear(width, VOCABULARY), gate),
    )


class Gated(nn.Module):
    """A layer behind a gate, forward and backward."""

    def __init__(self, layer: nn.Module, gate: str) -> None:
        super().__init__()
        self.layer, self.gate = layer, gate

    def forward(self, inputs: Tensor) -> Tensor:
        seed = torch.default_generator.initial_seed()
        if self.training:
            ask(self.gate, "forward", seed)
        outputs: Tensor = Passing.apply(self.layer(inputs), self.gate, seed)
        return outputs


class Passing(torch.autograd.Function):
    """The identity, with a gate on the way back."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, gate: str, seed: int) -> Tensor:
        context.gate, context.seed = gate, seed
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ask(context.gate, "backward", context.seed)
        return gradient, None, None


def connect(gate: str) -> socket.socket:
    """Where Unix sockets are refused, since it is confined, by the port beside the gate."""
    try:
        connection = socket.socket(socket.AF_UNIX)
    except PermissionError:
        return socket.create_connection(("127.0.0.1", int(Path(f"{gate}.port").read_text())))
    connection.connect(gate)
    return connection


def ask(gate: str, direction: str, seed: int) -> None:
    """Returns once the gate lets this pass through, or is gone."""
    key = (os.getpid(), gate)
    try:
        if key not in _connections:
            _connections[key] = None
            _connections[key] = connect(gate)
        connected = _connections[key]
        if connected is not None:
            connected.sendall(f"{os.getpid()} {direction} {seed}\n".encode())
            if not connected.recv(1):
                _connections[key] = None
    except (OSError, ValueError):
        _connections[key] = None
