"""How many microbatches instances may hold and senders may have open. Imports nothing: all of the control
plane may ask."""

from __future__ import annotations

import math
from collections.abc import Sequence


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Microbatches that an instance of a stage may hold at once: computed forward, but not yet backward.

    Args:
        replicas: of each stage.
        stage: which.
    """
    return in_flight_before(len(replicas) - stage - 1, sum(replicas[stage + 1 :]), replicas[stage])


def in_flight_before(later_stages: int, later_instances: int, replicas: int) -> int:
    """`in_flight`, by what comes behind a stage.

    If hops took no time and all instances were equally fast, a stage would need one of them for itself and
    for each later stage to keep these busy (1F1B). As many again hide the hops. Few instances in front of
    many have to hold more: all of the later ones work on what these hold. Replicas of different speed queue
    up behind slower ones, and need two more, except in the last stage. The price is memory for activations.
    `tests/sim/test_routing.py` prints what remains of the bubble, and of the bound of unequal replicas.
    """
    unequal = 2 if replicas > 1 and later_stages else 0
    deep = max(later_stages + 1, math.ceil((later_instances + replicas) / replicas))
    return 2 * deep + unequal


def held(microbatches: int, in_flight: int, most: int = 0) -> int:
    """Microbatches for whose activations an instance needs memory; `most` 0: no other bound."""
    flying = min(microbatches, in_flight)
    return min(flying, most) if most else flying


def pull_window(microbatches: int, senders: int, replicas: int) -> int:
    """Microbatches that one unit before stage 0 may ask one unit before it for at once.

    They hold no activations, only samples: as many as keep them busy for this step and the next, within what
    memory should hold.
    """
    return max(2, min(16, math.ceil(2 * microbatches / max(1, senders * replicas))))


def window(replicas: Sequence[int], stage: int, senders: int) -> int:
    """Microbatches that one sender may have open at one receiver: its part of what the receiver may hold.

    More would only wait in queues that the choice of the next hop can't see. Routers give slower receivers
    fewer (`entities.router.core`).
    """
    return max(1, math.ceil(in_flight(replicas, stage) / max(1, senders)))
