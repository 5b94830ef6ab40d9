"""How many microbatches instances may hold and senders may have open. Imports nothing: all of the control
plane may ask."""

from __future__ import annotations

import math


def in_flight(stages: int, stage: int, replicas: int) -> int:
    """Microbatches that a replica may hold at once: computed forward, but not yet backward.

    If hops took no time and all replicas were equally fast, a stage would need `stages - stage` of them to
    keep the later stages busy (1F1B). As many again hide the hops. Replicas of different speed queue up
    behind slower ones, and need two more, except in the last stage. The price is memory for activations.
    `tests/sim/test_routing.py` prints what remains of the bubble, and of the bound of unequal replicas.
    """
    unequal = 2 if replicas > 1 and stage < stages - 1 else 0
    return 2 * (stages - stage) + unequal


def held(stages: int, stage: int, replicas: int, microbatches: int, most: int = 0) -> int:
    """Microbatches for whose activations an instance needs memory; `most` 0: no other bound."""
    flying = min(microbatches, in_flight(stages, stage, replicas))
    return min(flying, most) if most else flying


def pull_window(microbatches: int, senders: int, replicas: int) -> int:
    """Microbatches that one unit before stage 0 may ask one unit before it for at once.

    They hold no activations, only samples: as many as keep them busy for this step and the next, within what
    memory should hold.
    """
    return max(2, min(16, math.ceil(2 * microbatches / max(1, senders * replicas))))


def window(stages: int, stage: int, senders: int, replicas: int) -> int:
    """Microbatches that one sender may have open at one receiver: its part of what the receiver may hold.

    More would only wait in queues that the choice of the next hop can't see.
    """
    return max(1, math.ceil(in_flight(stages, stage, replicas) / max(1, senders)))
