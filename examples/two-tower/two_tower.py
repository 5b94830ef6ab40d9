"""Two towers as a declared graph: what users and items have in common; and tastes to learn from."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from workers.graph.declared import DeclaredGraph

USERS, ITEMS = 200, 300


class Tower(nn.Module):
    """Ids (samples,) int64 → vectors (samples, width) of length one."""

    def __init__(self, ids: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(ids, width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.normalize(self.mix(self.embed(ids)), dim=-1)


class Match(nn.Module):
    """Cosines, times a learnt scale → logits (samples,)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(5.0)), nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (user * item).sum(-1) * self.scale + self.shift


def two_tower(width: int = 32) -> DeclaredGraph:
    graph = DeclaredGraph(inputs=("user", "item"))
    graph.layer("users", lambda: Tower(USERS, width), "user")
    graph.layer("items", lambda: Tower(ITEMS, width), "item")
    graph.layer("match", Match, "users", "items")
    return graph.returns(logits="match")


class Clicks:
    """Each user likes the items of one of five genres, and now and then any."""

    def __init__(self, count: int = 20_000) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int | float]:
        draw = random.Random(index)
        user, item = draw.randrange(USERS), draw.randrange(ITEMS)
        if draw.random() < 0.4:  # else there would be few clicks
            item += user % 5 - item % 5
        liked = user % 5 == item % 5
        return {"user": user, "item": item, "clicked": float(liked if draw.random() < 0.95 else not liked)}


def clicks_loss(logits: Tensor, clicked: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, clicked)
