"""User code that goes wrong, each factory in its own way; milliseconds per step."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SLOW_S = 3.0
"""Longer than it takes to tell how an instance ended."""
VOCABULARY = 256
WIDTH = 8


def sound(depth: int = 2) -> nn.Sequential:
    return chain(nn.Embedding(VOCABULARY, WIDTH), depth)


def raising() -> nn.Sequential:
    raise OSError("the tokenizer's file\nis on another machine")


def no_model() -> dict[str, Any]:
    return {"layers": 3}


def misfit() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, VOCABULARY))


def tied() -> nn.Sequential:
    """The embedding is the head's weight too, as in GPT-2."""
    model = chain(nn.Embedding(VOCABULARY, WIDTH), 2)
    model[-1].weight = model[0].weight
    return model


def allergic(poison: list[int], reaction: str) -> nn.Sequential:
    """Reacts to the one microbatch that begins with the tokens `poison`."""
    return chain(Allergic(poison, reaction), 2)


def shy(meetings: str) -> nn.Sequential:
    """Refuses each microbatch that it meets for the first time (`counter.Meetings`), and no other."""
    return chain(Shy(meetings), 2)


def held(gate: str, depth: int = 2) -> nn.Sequential:
    """Each microbatch takes 2 s, but no CPU time, as long as the file `gate` exists."""
    return nn.Sequential(Held(gate), *sound(depth))


def fetching(api_token: str, sha256: str) -> nn.Sequential:
    """Needs the token with this digest, and says which it got where it is another one."""
    if hashlib.sha256(api_token.encode()).hexdigest() != sha256:
        raise PermissionError(f"the hub refuses {api_token}")
    return sound()


def orphaning(gate: str) -> nn.Sequential:
    """The first instance that builds it ends its fork server, and dies with it, where the file `gate` is."""
    if not analysed():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(gate)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(SLOW_S)
    return sound()


def analysed() -> bool:
    """Whether this process only looks at the model."""
    return Path("/proc/self/comm").read_text().startswith("analysis")


def exam_nerves() -> nn.Sequential:
    """Trains well and can't be evaluated."""
    return nn.Sequential(TrainsOnly(), *sound())


def chain(first: nn.Module, depth: int) -> nn.Sequential:
    middle = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    return nn.Sequential(first, *middle, nn.Linear(WIDTH, VOCABULARY, bias=False))


class Allergic(nn.Embedding):
    def __init__(self, poison: list[int], reaction: str) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.poison, self.reaction = poison, reaction

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = super().forward(tokens)
        how, _, mark = self.reaction.partition(": ")
        poisoned = tokens[0, : len(self.poison)].tolist() == self.poison
        if not self.training or poisoned == (how == "raise at all others"):
            return embedded
        if how == "raise twice" and self.met_before(mark) >= 2:
            time.sleep(SLOW_S)
            return embedded
        if how == "raise in backward":
            embedded.register_hook(self.refuse)
            return embedded
        if how.startswith("raise at") or how in ("raise", "raise twice"):
            raise LookupError("no such word\nin any dictionary")
        if how == "raise once" and self.met_before(mark) == 0:
            raise LookupError("no such word\nin any dictionary")
        return embedded * torch.nan if how == "nan" else embedded

    def met_before(self, mark: str) -> int:
        """How many have met the poison, before this one: `mark` counts (`counter.py`)."""
        host, _, port = mark.partition(":")
        with socket.create_connection((host, int(port))) as counter, counter.makefile() as answer:
            return int(answer.readline())

    def refuse(self, gradient: Tensor) -> Tensor:
        raise LookupError("no such gradient")


class Shy(nn.Embedding):
    def __init__(self, meetings: str) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.meetings = meetings

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and self.meetings and not analysed():
            host, _, port = self.meetings.partition(":")
            with socket.create_connection((host, int(port))) as server, server.makefile("rw") as line:
                print(tokens.tolist(), file=line, flush=True)
                if int(line.readline()) == 0:
                    raise LookupError("we have not met")
        return super().forward(tokens)


class Held(nn.Module):
    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = Path(gate)

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(250):  # no pass lasts for so long that its step counts as one that does not go on
            if not self.training or not self.gate.exists():
                break
            time.sleep(0.02)
        return tokens


class TrainsOnly(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("nothing prepared me for this")
        return tokens


class Scattering(nn.Module):
    """Writes by index, an operation that torch has no deterministic form of."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2, device=x.device)
        return x + x.new_zeros(x.shape).put(index, x.new_ones(2))


def scattering() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Scattering(), nn.Linear(WIDTH, VOCABULARY))
