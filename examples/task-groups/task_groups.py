"""Requests of several tasks, grouped by their features, train one backbone with a branch for each group.

It follows figure 4 of draft-yang-dmsc-distributed-model-01, with a segmentation by business: requests are
collected, features are extracted, matching by features makes groups, and a model of one shared part and a
branch per group is trained. The mesh adds the gradients of all its parts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

TASKS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "parity": ("is {0} plus {1} even", lambda a, b: (a + b) % 2),
    "larger": ("which is larger {0} or {1}", lambda a, b: int(b > a)),
    "near": ("are {0} and {1} neighbours", lambda a, b: int(abs(a - b) == 1)),
}
"""Task → its form, and its answer: 0 or 1."""
FEATURES = 32


def collected(count: int, seed: int = 0) -> list[tuple[str, int, int, int]]:
    """Requests as they come in: text, its two numbers, the answer. Which task it is, nobody says."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        form, answer = TASKS[draw.choice(list(TASKS))]
        a, b = draw.randrange(10), draw.randrange(10)
        found.append((form.format(a, b), a, b, answer(a, b)))
    return found


def features(text: str) -> Tensor:
    """The words that are no numbers, each in a place by its letters → (FEATURES,) float32 of length one."""
    places = Counter(sum(map(ord, word)) % FEATURES for word in text.split() if not word.isdigit())
    vector = torch.zeros(FEATURES)
    for place, times in places.items():
        vector[place] = times
    return nn.functional.normalize(vector, dim=0)


class Matching:
    """Puts a request into the group whose first request is most like it, or into a new one.

    Args:
        groups: The most groups.
        least: The least cosine of requests of one group.
    """

    def __init__(self, groups: int, least: float = 0.8) -> None:
        self.groups, self.least = groups, least
        self.first: list[Tensor] = []

    def group(self, vector: Tensor) -> int:
        likeness = [float(vector @ one) for one in self.first]
        if len(self.first) < self.groups and max(likeness, default=0.0) < self.least:
            self.first.append(vector)
            return len(self.first) - 1
        return max(range(len(likeness)), key=likeness.__getitem__)


class GroupedRequests:
    """Collected requests with their features and groups."""

    def __init__(self, count: int = 4000, groups: int = len(TASKS)) -> None:
        matching = Matching(groups)
        self.samples: list[dict[str, int | Tensor]] = []
        for text, a, b, answer in collected(count):
            vector = features(text)
            numbers = torch.tensor([a, b])
            self.samples.append(
                {"group": matching.group(vector), "numbers": numbers, "features": vector, "targets": answer}
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, int | Tensor]:
        return self.samples[index]


class Branches(nn.Module):
    """A backbone that all tasks share, and a branch for each group."""

    def __init__(self, groups: int = len(TASKS), width: int = 64) -> None:
        super().__init__()
        self.number = nn.Embedding(10, width)
        self.backbone = nn.Sequential(nn.Linear(2 * width + FEATURES, width), nn.ReLU())
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)) for _ in range(groups)
        )

    def forward(self, numbers: Tensor, features: Tensor, group: Tensor) -> Tensor:
        """Numbers (samples, 2), features (samples, FEATURES), group (samples,) → logits (samples, 2)."""
        shared = self.backbone(torch.cat([self.number(numbers).flatten(1), features], dim=1))
        answers = torch.stack([branch(shared) for branch in self.branches], dim=1)
        logits: Tensor = answers.gather(1, group.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        return logits
