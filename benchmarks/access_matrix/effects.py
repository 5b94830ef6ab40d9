"""What each kind of credential may cause and learn, written by hand from what docs/security.md promises.

Nothing here is derived from `bus.subjects` or `bus.permissions`: whoever widens those has to come here, too.
Patterns are NATS's; those that begin neither with `$`, `_` nor `object ` are below `dmsc.v1.`. The world's
names: cluster `a` (agent `a-n`) and `b`; job `j` with `j-s0-r0` (who attacks) and `j-s1-r0`, another job `k`
with `k-s0-r0`; modules `mine` and `another`; users by their role.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "dmsc.v1."
ABSOLUTE = ("$", "_", ">", "object ")


@dataclass(frozen=True, slots=True)
class Effects:
    """`says`: subjects that its messages reach, as they were sent; nothing else that it sends reaches anybody
    or changes anything. `learns`: on which subjects a message, or what is stored of it, may come to it;
    `object NAME` is an object.
    """

    about: str
    says: tuple[str, ...] = ()
    learns: tuple[str, ...] = ()


def patterns(names: tuple[str, ...]) -> tuple[str, ...]:
    """In full."""
    return tuple(name if name.startswith(ABSOLUTE) else ROOT + name for name in names)


def fits(pattern: str, subject: str) -> bool:
    """Whether a subject is one of a pattern's."""
    mine, theirs = pattern.split("."), subject.split(".")
    for index, token in enumerate(mine):
        if token == ">":
            return len(theirs) > index
        if index >= len(theirs) or token not in ("*", theirs[index]):
            return False
    return len(mine) == len(theirs)


_OPEN = (
    # the rows that nothing private travels on: what a tap shows everybody
    *("signal.registration.*", "signal.advertisement", "signal.compute.*", "signal.qos.>"),
    *("registry.>", "mesh.>", "topology.>", "step.>", "state.>", "data.>", "telemetry.>"),
    *("cluster.*.stop", "cluster.*.judge", "cluster.*.analyse", "cluster.*.strike", "cluster.*.forget"),
    *("cluster.*.sample", "policy.>", "fault.>", "log.*"),
    *("job.event.*", "job.command.*"),
    *("$KV.registry.*", "$KV.routes.>", "$KV.leadership.*", "$KV.cordons.>", "$KV.steps.*"),
    *("$KV.modules.*", "$KV.standings.>", "$KV.jobs.*"),
)
_EVERYBODY = ("fault.verdict.*", "job.event.*", "$KV.registry.*", "$KV.jobs.*")
"""What all entities, instances and modules learn."""


def _of_module(name: str) -> tuple[str, ...]:
    """What a functional module of this name says."""
    return (
        *(f"signal.registration.{name}", f"registry.state.{name}", f"registry.heartbeat.{name}"),
        *("registry.resolve", f"log.{name}", f"dead_letter.{name}", "store.query.*.*"),
        *(f"policy.suggestion.{name}", f"policy.score.{name}", f"policy.lifecycle.{name}"),
    )


VIEWER = Effects("looks: asks nobody anything, and changes nothing", says=(), learns=_OPEN)
RESEARCHER = Effects(
    "asks gateways and modules, who decide again; changes nothing by itself",
    says=("door.*", "policy.question.*.*"),
    learns=_OPEN,
)
RESEARCHERS_MODULE = Effects(
    "the researcher, and a module of that name: suggests, scores, and tells of itself, as that alone",
    says=(
        *RESEARCHER.says,
        *_of_module("researcher-bold"),
    ),
    learns=(*_OPEN, *_EVERYBODY),
)
OPERATOR = Effects(
    "hears everything; asks gateways, modules and instances' stores; tells observations",
    says=("door.*", "policy.question.*.*", "store.query.*.*", "telemetry.observation.*"),
    learns=(">", "object j/weights", "object k/weights"),
)
ADMIN = Effects(
    "as an operator, and runs modules of any name; writes nothing that is kept but by asking a gateway",
    says=(*OPERATOR.says, *_of_module("laptop-of-admin")),
    learns=OPERATOR.learns,
)
INSTANCE = Effects(
    "speaks as itself and of its job; writes notices to its job's instances; meets them, in its job's places",
    says=(
        *("signal.registration.j-s0-r0", "registry.state.j-s0-r0", "registry.heartbeat.j-s0-r0"),
        *("registry.resolve", "log.j-s0-r0", "dead_letter.j-s0-r0"),
        *("step.claim.j.j-s0-r0", "data.notice.j.*", "data.answer.j.*", "telemetry.instance.j.j-s0-r0"),
        "fault.link.a",
    ),
    learns=(
        *("step.*.j.j-s0-r0", "state.*.j.j-s0-r0", "store.query.j.j-s0-r0"),
        *("data.notice.j.j-s0-r0", "data.answer.j.j-s0-r0"),
        *("fault.verdict.*", "job.event.j", "$KV.registry.*", "$KV.jobs.j", "$KV.routes.j.>"),
        "object j/weights",
    ),
)
AGENT = Effects(
    "speaks for its node and of its instances; takes orders for its node; tells what models look like",
    says=(
        *("signal.registration.*", "registry.state.*", "registry.heartbeat.a-n", "registry.resolve"),
        *("log.a-n", "dead_letter.a-n", "mesh.node.a-n", "telemetry.node.a-n"),
        *("topology.model.*", "topology.failed.*", "topology.sample.*"),
    ),
    learns=("cluster.a-n.*", "mesh.leader", *_EVERYBODY),
)
MODULE = Effects(
    "suggests and scores as itself; asks instances' stores; takes orders and questions for itself",
    says=(*_of_module("mine"),),
    learns=(
        *("signal.advertisement", "signal.compute.*", "signal.qos.report.*", "mesh.leader"),
        *("step.claim.*.*", "data.notice.*.*", "telemetry.instance.*.*", "telemetry.node.*"),
        *("telemetry.observation.*", "topology.graph.*", "policy.decision.*", "policy.switch.*"),
        *("policy.order.mine", "policy.question.mine.*", "policy.suggestion.mine", *_EVERYBODY),
    ),
)
TOOL = Effects(
    "a client of the mesh's owner: asks gateways, modules, registry and stores; hears what is not private",
    says=(
        *("registry.heartbeat.tool", "registry.resolve", "log.tool", "dead_letter.tool"),
        *("store.query.*.*", "telemetry.observation.*", "door.*", "policy.question.*.*"),
    ),
    learns=(*_OPEN, "dead_letter.*"),
)


def _agent_named(name: str) -> Effects:
    says = tuple(said.replace("a-n", name) for said in AGENT.says)
    return Effects(AGENT.about, says, tuple(learnt.replace("a-n", name) for learnt in AGENT.learns))


JOINS_A = _agent_named("join-a")
JOINS_ANY = _agent_named("join-any")
