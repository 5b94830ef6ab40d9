"""Does the matrix see? The guard's lists are widened on purpose, one at a time, and each must be found.

A widening is something that a careless line in `bus.guard.permissions` could give. It is put into what the
running guard signs, so the real server grants it.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.access_matrix.parties import PARTIES, Party
from benchmarks.access_matrix.trial import Trial, Wrong
from benchmarks.access_matrix.world import Widening, World


@dataclass(frozen=True, slots=True)
class Mutant:
    """`party` by title: what it may publish and listen to beyond its own."""

    party: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        verb = "publishes" if self.publish else "listens to"
        return f"{self.party} {verb} {(*self.publish, *self.subscribe)[0]}"


MUTANTS = (
    Mutant("viewer", publish=("$JS.API.STREAM.DELETE.AUDIT",)),
    Mutant("viewer", publish=("$JS.API.DIRECT.GET.KV_users.>",)),
    Mutant("viewer", subscribe=("$KV.users.>",)),
    Mutant("viewer", subscribe=("dmsc.v1.signal.access.*",)),
    Mutant("researcher", publish=("$KV.users.*",)),
    Mutant("researcher", publish=("dmsc.v1.job.command.cancel",)),
    Mutant("researcher", subscribe=("_INBOX.gateway.>",)),
    Mutant("researcher's module", publish=("dmsc.v1.policy.suggestion.*.*",)),
    Mutant("researcher's module", publish=("dmsc.v1.policy.suggestion.*.researcher-bold",)),
    Mutant("researcher's module", publish=("dmsc.v1.store.query.*.*",)),
    Mutant("researcher's module", publish=("dmsc.v1.broker.owner.*.*",)),
    Mutant("module of a job", publish=("dmsc.v1.store.query.k.*",)),
    Mutant("operator", publish=("$O.artifacts.>",)),
    Mutant("operator", publish=("dmsc.v1.audit.*",)),
    Mutant("admin", publish=("dmsc.v1.job.event.*",)),
    Mutant("instance", publish=("dmsc.v1.step.claim.*.*",)),
    Mutant("instance", publish=("dmsc.v1.registry.heartbeat.*",)),
    Mutant("instance", publish=("$JS.API.CONSUMER.CREATE.LOGS.*.>",)),
    Mutant("instance", subscribe=("dmsc.v1.step.commit.j.*",)),
    Mutant("instance", subscribe=("dmsc.v1.data.notice.k.*",)),
    Mutant("node agent", publish=("dmsc.v1.cluster.b-n.start",)),
    Mutant("node agent", publish=("$JS.API.STREAM.PURGE.LOGS",)),
    Mutant("module", publish=("_INBOX.>",)),
    Mutant("module", publish=("$JS.ACK.>",)),
    Mutant("client", publish=("$SYS.REQ.>",)),
    Mutant("client", publish=("$JS.API.STREAM.SNAPSHOT.*",)),
    Mutant("join credential", publish=("dmsc.v1.mesh.node.b-n",)),
    Mutant("join credential of any cluster", subscribe=(">",)),
    Mutant("gateway", publish=("$KV.jobs.*",)),
    Mutant("gateway", publish=("$JS.API.STREAM.DELETE.*",)),
    Mutant("gateway", subscribe=("$KV.users.>",)),
    Mutant("router", publish=("$KV.routes.>",)),
    Mutant("router", publish=("$JS.API.STREAM.MSG.GET.KV_users",)),
    Mutant("router", subscribe=("_INBOX.orchestrator.>",)),
)


async def finds(
    world: World, mutant: Mutant, known: frozenset[tuple[str, str]] = frozenset()
) -> Wrong | None:
    """What gives the mutant away; None: nothing. `known`: (party, probe) that are wrong without it, too."""
    party = party_of(mutant)
    world.widen(Widening(party.name, mutant.publish, mutant.subscribe))
    try:
        found = await Trial(world, party, known=known).run(first_only=True)
    finally:
        world.widen(None)
    return found.wrong[0] if found.wrong else None


def party_of(mutant: Mutant) -> Party:
    return next(party for party in PARTIES if party.title == mutant.party)
