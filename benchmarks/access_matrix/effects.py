"""What each kind of credential may cause and learn, written by hand from what docs/security.md promises.

Nothing here is derived from `bus.subjects` or `bus.guard.permissions`: whoever widens those has to come here,
too. Patterns are NATS's; those that begin neither with `$`, `_` nor `object ` are below `dmsc.v1.`. The
world's
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
    `object NAME` is an object. `writes`: what it, or a broker for it, writes over. `{label}` is the name of
    its inbox. `beyond`: what it says on subjects of no row, to JetStream above all; only the control plane.
    """

    about: str
    says: tuple[str, ...] = ()
    learns: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()


def patterns(names: tuple[str, ...], label: str) -> tuple[str, ...]:
    """In full."""
    filled = (name.replace("{label}", label) for name in names)
    return tuple(name if name.startswith(ABSOLUTE) else ROOT + name for name in filled)


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
    *("registry.>", "mesh.>", "topology.>", "step.>", "state.>", "recut.>"),
    *("data.>", "telemetry.>"),
    *("cluster.*.stop", "cluster.*.judge", "cluster.*.analyse", "cluster.*.strike", "cluster.*.forget"),
    *("cluster.*.leave", "cluster.*.sample", "policy.>", "fault.>", "log.*"),
    *("job.event.*", "job.command.*", "queue.event.*", "account.slots.*"),
    *(
        "$KV.registry.*",
        "$KV.routes.>",
        "$KV.leadership.*",
        "$KV.cordons.>",
        "$KV.reservations.*",
        "$KV.steps.*",
    ),
    *("$KV.automation.*", "$KV.modules.*", "$KV.standings.>", "$KV.jobs.*", "$KV.datasets.*", "$KV.feeds.>"),
    *("$KV.builds.*", "$KV.learnt.>"),
    # services, but for what they are asked and answer
    *("service.command.*", "service.query", "serve.end.*.*", "serve.need.*.*", "$KV.services.*"),
)
_MEETING = tuple(
    f"{kind}.{place}.*"
    for kind in ("$KV.rendezvous", "rendezvous.counter")
    for place in ("bGlua3Mvag", "cmVkdWN0aW9uL2o")  # links/j and reduction/j, in base64
)
"""Where the instances of job j meet."""
_EVERYBODY = ("fault.verdict.*", "job.event.*", "$KV.registry.*", "$KV.jobs.*")
"""What all entities, instances and modules learn."""


def _of_module(name: str, owner: str = "system") -> tuple[str, ...]:
    """What a functional module of this name says; `owner`: for whose jobs, where not for all."""
    return (
        *(f"signal.registration.{name}", f"registry.state.{name}", f"registry.heartbeat.{name}"),
        *("registry.resolve", f"log.{name}", f"dead_letter.{name}"),
        *(f"policy.suggestion.{owner}.{name}", f"policy.score.{owner}.{name}"),
        *(f"policy.lifecycle.{owner}.{name}", f"policy.drift.{owner}.{name}"),
        *(f"policy.learnt.query.{owner}.{name}", f"policy.learnt.keep.{owner}.{name}"),
        f"policy.fault_answer.{owner}.{name}",
    )


VIEWER = Effects(
    "looks: asks nobody but brokers, for what it may see, and changes nothing",
    says=("broker.user.viewer.{label}",),
    learns=_OPEN,
)
RESEARCHER = Effects(
    "asks gateways and modules, who decide again; changes nothing by itself",
    says=(*VIEWER.says, "door.*", "policy.question.*.*"),
    learns=_OPEN,
)
RESEARCHERS_MODULE = Effects(
    "the researcher, and a module of that name: suggests, scores, and tells of itself, as that alone; "
    "a broker asks stores for it, of the researcher's jobs (there are none)",
    says=(
        *RESEARCHER.says,
        *_of_module("researcher-bold", "researcher"),
        "broker.owner.researcher.{label}",
    ),
    learns=(*_OPEN, *_EVERYBODY),
)
OPERATOR = Effects(
    "hears everything; asks gateways, modules and instances' stores; tells observations",
    says=(
        *RESEARCHER.says,
        *("store.query.*.*", "telemetry.observation.*", "broker.user.operator.{label}"),
    ),
    learns=(">",),
)
ADMIN = Effects(
    "speaks in anyone's name where no stream acknowledges it; writes no record of jobs, users, the audit",
    says=(
        *OPERATOR.says,
        *("signal.>", "access.>", "registry.>", "mesh.>", "cluster.>", "step.>", "state.>", "recut.>"),
        *(
            "data.answer.>",
            "data.block.>",
            "data.blocks.>",
            "data.command.*",
            "data.notice.>",
            "data.prepared.>",
        ),
        *("telemetry.>", "topology.>", "policy.>", "log.*", "dead_letter.*", "job.command.*"),
        *("queue.event.capacity", "account.slots.*", "account.use.*", "account.query"),
        *("model.command.*", "model.query.keys", "machines.*"),
        *("fault.link.*.*", "fault.report.*", "fault.verdict.*", "fault.cluster.*.*"),
        *("service.>", "serve.>"),
    ),
    learns=OPERATOR.learns,
)
INSTANCE = Effects(
    "speaks as itself and of its job; writes notices to its job's instances; meets them, in its job's places",
    says=(
        *("signal.registration.j-s0-r0", "registry.state.j-s0-r0", "registry.heartbeat.j-s0-r0"),
        *("registry.resolve", "log.j-s0-r0", "dead_letter.j-s0-r0"),
        *("step.claim.j.j-s0-r0", "data.notice.j.*", "data.answer.j.*", "telemetry.instance.j.j-s0-r0"),
        *("data.blocks.j.j-s0-r0", "data.block.j.*"),
        *("serve.need.j.*", "serve.tokens.j.j-s0-r0"),
        *("fault.link.*.j", "broker.instance.j.j-s0-r0"),
    ),
    learns=(
        *("step.*.j.j-s0-r0", "state.*.j.j-s0-r0", "recut.*.j.j-s0-r0", "store.query.j.j-s0-r0"),
        *("data.notice.j.j-s0-r0", "data.answer.j.j-s0-r0", "data.blocks.j.*", "data.block.j.j-s0-r0"),
        *("serve.bind.j.j-s0-r0", "serve.end.j.j-s0-r0", "serve.need.j.j-s0-r0", "serve.predict.j.j-s0-r0"),
        "serve.tokens.j.*",
        *("fault.verdict.*", "job.event.j", "$KV.registry.*", "$KV.jobs.j", "$KV.routes.j.>"),
        *("$KV.feeds.>", "$KV.feed_records.>", "object artifacts/j/weights", *_MEETING),
    ),
    writes=(*_MEETING, "$O.artifacts.C.j.*", "$O.artifacts.M.YXJ0aWZhY3RzL2ovd2VpZ2h0cw=="),
)
AGENT = Effects(
    "speaks for its node and of its instances; takes orders for its node; tells what models look like",
    says=(
        *("signal.registration.a-n", "registry.state.a-n", "registry.heartbeat.a-n", "registry.resolve"),
        *("registry.instance_record.a-n.*", "registry.instance_state.a-n.*"),
        *("log.a-n", "dead_letter.a-n", "mesh.node.a-n", "mesh.leaving.a-n"),
        "telemetry.node.a-n",
        *("topology.model.a-n.*", "topology.failed.a-n.*", "topology.sample.a-n.*", "broker.cluster.a.a-n"),
        *("data.prepared.a-n.*", "fault.cluster.a-n.*", "account.slots.a-n"),
    ),
    learns=("cluster.a-n.*", "mesh.leader", "telemetry.instance.*.*", *_EVERYBODY),
)
MODULE = Effects(
    "suggests and scores as itself; asks instances' stores; takes orders and questions for itself",
    says=(*_of_module("mine"), "store.query.*.*", "broker.functional-module.mine.mine"),
    learns=(
        *("signal.advertisement", "signal.compute.*", "signal.qos.report.*", "mesh.leader"),
        *("step.claim.*.*", "data.notice.*.*", "telemetry.instance.*.*", "telemetry.node.*"),
        *("telemetry.observation.*", "telemetry.outcomes.*", "topology.graph.*"),
        *("policy.decision.*", "policy.switch.*"),
        "policy.learnt.state.*.*",
        "policy.fault_question.*",
        "$KV.services.*",
        *("policy.order.mine", "policy.question.mine.*", "policy.suggestion.system.mine", *_EVERYBODY),
    ),
)
_BOUND = tuple(said.replace("mine", "bound") for said in MODULE.says if said != "store.query.*.*")
BOUND_MODULE = Effects(
    "a module whose credential lists a job: asks the stores of that one alone",
    says=(*_BOUND, "store.query.j.*"),
    learns=tuple(learnt.replace("mine", "bound") for learnt in MODULE.learns),
)
TOOL = Effects(
    "a tool of the mesh's owner, who alone makes its credential: asks gateways, modules, registry, stores; "
    "hears what is not private, and reads all that is kept (secrets in it are sealed)",
    says=(
        *("registry.heartbeat.tool", "registry.resolve", "log.tool", "dead_letter.tool"),
        *("store.query.*.*", "telemetry.observation.*", "door.*", "policy.question.*.*"),
        "broker.client.~.tool",
    ),
    learns=(*_OPEN, "dead_letter.*", "unreadable.*", "audit.*", "$KV.>"),
)


def _agent_named(name: str, cluster: str) -> Effects:
    says = tuple(said.replace("a.a-n", f"{cluster}.a-n").replace("a-n", name) for said in AGENT.says)
    return Effects(AGENT.about, says, tuple(learnt.replace("a-n", name) for learnt in AGENT.learns))


JOINS_A = _agent_named("join-a", "a")
JOINS_ANY = _agent_named("join-any", "~")


# --- the control plane's, where it is handed out -----------------------------------------------------------
_STREAMS = (
    "ACCOUNTS",
    *("AUDIT", "DEAD_LETTERS", "FAULTS", "FAULT_QUEUE", "JOBS", "LEARNT", "LOGS", "POLICIES", "SIGNALS"),
    *("GENERATIONS", "KV_generations", "KV_services", "KV_service_salt"),
    *("STEPS", "TELEMETRY", "UNREADABLE", "OBJ_artifacts", "KV_rendezvous", "RENDEZVOUS_COUNTERS"),
    *(
        "KV_answers",
        "KV_batches",
        "KV_builds",
        "KV_cordons",
        "KV_reservations",
        "KV_data_sets",
        "KV_datasets",
        "KV_feed_records",
        "KV_feeds",
        "KV_jobs",
        "KV_leadership",
        "KV_learnt",
    ),
    *(
        "KV_link_secrets",
        "KV_automation",
        "KV_modules",
        "KV_registry",
        "KV_revocations",
        "KV_routes",
        "KV_secrets",
        "KV_standings",
        "KV_steps",
    ),
    *(
        "KV_consents",
        "KV_kept",
        "KV_units",
        "KV_uploads",
        "KV_users",
        "KV_accounts",
        "KV_account_positions",
        "KV_budgets",
        "KV_models",
        "KV_model_versions",
        "KV_alias_moves",
        "KV_machine_pools",
    ),
)


def _provisions() -> tuple[str, ...]:
    """Makes the mesh's streams, and says how they are: with that it could have one republish anything."""
    calls = (
        f"$JS.API.STREAM.{call}.{stream}" for stream in _STREAMS for call in ("CREATE", "UPDATE", "INFO")
    )
    return ("$JS.API.STREAM.NAMES", *calls)


def _reads(kept: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What it asks JetStream itself: by stream, the subjects of which it reads what is kept."""
    found = []
    for stream, places in kept.items():
        found += [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*", f"$JS.API.CONSUMER.DELETE.{stream}.*"]
        for place in patterns(places, ""):
            found += [f"$JS.API.CONSUMER.CREATE.{stream}.*.{place}", f"$JS.API.DIRECT.GET.{stream}.{place}"]
    return tuple(found)


def _itself(name: str) -> tuple[str, ...]:
    """What every part of the control plane says of itself."""
    return (
        *(f"signal.registration.{name}", f"registry.state.{name}", f"registry.heartbeat.{name}"),
        *("registry.resolve", f"mesh.registration.{name}", f"mesh.termination.*.{name}"),
        *(f"signal.qos.report.{name}", f"fault.report.{name}", f"log.{name}", f"dead_letter.{name}"),
        f"unreadable.{name}",
    )


_FEEDS = ("$KV.feeds.feed.*", "$KV.feeds.segment.*.*", "$KV.feed_records.*.*")
_BATCHES = ("$KV.batches.batch.*", "$KV.batches.file.*", "$KV.batches.unit.*.*")
_BACKFLOW = (
    *("$KV.consents.collection.*.*", "$KV.consents.consent.*.*", "$KV.consents.key.*"),
    "$KV.kept.*.*.*.*",
)
_GATEWAY_KEEPS = (
    *_BACKFLOW,
    "$KV.answers.*",
    *_BATCHES,
    "$KV.datasets.*",
    "$KV.generations.*",
    "$KV.secrets.*.*",
    "$KV.service_salt.*",
    "$KV.uploads.*",
    *_FEEDS,
)
_MODELS = ("$KV.models.*", "$KV.model_versions.*.*", "$KV.alias_moves.*.*.*")
GATEWAY = Effects(
    "asks everybody for its users, after Type 3; hears all that is said; keeps data sets, feeds, answers, "
    "secrets, objects; writes no record of jobs, users, revocations, routes, the audit",
    says=(
        *_itself("gateway-a"),
        *("signal.access.gateway-a", "access.explain.gateway-a", "access.users.gateway-a"),
        *("job.command.*", "mesh.command.*", "mesh.query", "policy.command.*", "policy.question.*.*"),
        *("data.command.*", "model.command.*", "model.query.keys"),
        *("machines.query", "machines.order", "machines.release", "machines.reset"),
        *("cluster.*.read", "cluster.*.strike", "step.dispatch.*.*", "store.query.*.*"),
        *("telemetry.observation.*", "telemetry.service.gateway-a", "account.query", "account.use.gateway-a"),
        "telemetry.outcomes.gateway-a",
        *("service.command.*", "service.query", "serve.bind.*.*", "serve.end.*.*", "serve.predict.*.*"),
        *_GATEWAY_KEEPS,
    ),
    learns=(
        *("signal.>", "access.>", "registry.>", "mesh.>", "topology.>", "step.>", "state.>", "recut.>"),
        "data.>",
        *("telemetry.>", "cluster.*.*", "policy.>", "fault.>", "log.*", "job.>", "door.*", "dead_letter.*"),
        *("unreadable.*", "audit.*", "store.query.*.*", "queue.event.*", "account.>", "model.>", *_MODELS),
        "machines.>",
        *(*_GATEWAY_KEEPS, "$KV.jobs.*", "$KV.registry.*", "$KV.revocations.*.*", "$KV.routes.>"),
        *("$KV.builds.*", "$KV.data_sets.*.*", "$KV.services.*", "service.>", "serve.>"),
        *("$O.artifacts.M.>", "object artifacts/j/weights", "object artifacts/k/weights"),
    ),
    writes=(*_GATEWAY_KEEPS, "$O.artifacts.>"),
    beyond=(
        *_provisions(),
        *_reads(
            {
                "ACCOUNTS": ("account.slots.*", "account.use.*"),
                "AUDIT": ("audit.*",),
                "DEAD_LETTERS": ("dead_letter.*",),
                "FAULTS": ("fault.link.*.*", "fault.verdict.*"),
                "FAULT_QUEUE": ("fault.record.*.*",),
                "GENERATIONS": ("serve.tokens.*.*",),
                "JOBS": ("job.event.*", "data.event.*"),
                "LOGS": ("log.*",),
                "POLICIES": (
                    *("policy.decision.*", "policy.score.*.*", "policy.suggestion.*.*", "policy.switch.*"),
                    "policy.drift.*.*",
                    *("policy.fault_answer.*.*", "policy.fault_question.*"),
                ),
                "LEARNT": ("policy.learnt.state.*.*",),
                "SIGNALS": (
                    *("mesh.leader", "mesh.termination.*.*", "signal.advertisement", "signal.compute.*"),
                    *("signal.qos.report.*", "topology.graph.*"),
                ),
                "STEPS": ("data.notice.*.*", "step.claim.*.*"),
                "TELEMETRY": (
                    *("telemetry.instance.*.*", "telemetry.node.*", "telemetry.observation.*"),
                    "telemetry.outcomes.*",
                ),
                "UNREADABLE": ("unreadable.*",),
                "KV_answers": ("$KV.answers.*",),
                "KV_batches": _BATCHES,
                "KV_builds": ("$KV.builds.*",),
                "KV_models": _MODELS[:1],
                "KV_model_versions": _MODELS[1:2],
                "KV_alias_moves": _MODELS[2:],
                "KV_data_sets": ("$KV.data_sets.*.*",),
                "KV_datasets": ("$KV.datasets.*",),
                "KV_generations": ("$KV.generations.*",),
                "KV_services": ("$KV.services.*",),
                "KV_consents": _BACKFLOW[:3],
                "KV_kept": _BACKFLOW[3:],
                "KV_service_salt": ("$KV.service_salt.*",),
                "KV_feeds": _FEEDS[:2],
                "KV_feed_records": _FEEDS[2:],
                "KV_secrets": ("$KV.secrets.*.*",),
                "KV_uploads": ("$KV.uploads.*",),
                "KV_jobs": ("$KV.jobs.*",),
                "KV_registry": ("$KV.registry.*",),
                "KV_revocations": ("$KV.revocations.*.*",),
                "KV_routes": ("$KV.routes.*.*.*",),
                "OBJ_artifacts": ("$O.artifacts.M.>",),
            }
        ),
        *(f"$JS.API.STREAM.MSG.GET.KV_{name}" for name in ("answers", "datasets", "feeds", "feed_records")),
        *(f"$JS.API.STREAM.MSG.GET.KV_{name}" for name in ("secrets", "uploads", "generations", "batches")),
        *("$JS.API.STREAM.MSG.GET.OBJ_artifacts", "$JS.API.STREAM.PURGE.OBJ_artifacts", "$O.artifacts.>"),
        "_INBOX.*.*.*.any.gateway-a.*",
    ),
)
ROUTER = Effects(
    "writes routes of its own cluster; asks modules; hears telemetry, faults of its cluster, jobs' events; "
    "reads the whole streams to which it says something itself",
    says=(*_itself("router-a"), "signal.compute.a", "policy.question.*.*", "$KV.routes.*.a.*"),
    learns=(
        *("signal.advertisement", "signal.compute.*", "signal.qos.policy.router-a", "mesh.leader"),
        *("telemetry.instance.*.*", "telemetry.node.*", "fault.link.a.*", *_EVERYBODY, "$KV.routes.>"),
        *("log.*", "dead_letter.*", "unreadable.*", "signal.qos.report.*", "mesh.termination.*.*"),
    ),
    writes=("$KV.routes.*.a.*",),
    beyond=(
        *_provisions(),
        *_reads(
            {
                "DEAD_LETTERS": ("dead_letter.*",),
                "FAULTS": ("fault.link.a.*", "fault.verdict.*"),
                "JOBS": ("job.event.*",),
                "LOGS": ("log.*",),
                "SIGNALS": (
                    *("mesh.leader", "mesh.termination.*.*", "signal.advertisement", "signal.compute.*"),
                    "signal.qos.report.*",
                ),
                "TELEMETRY": ("telemetry.instance.*.*", "telemetry.node.*"),
                "UNREADABLE": ("unreadable.*",),
                "KV_jobs": ("$KV.jobs.*",),
                "KV_registry": ("$KV.registry.*",),
                "KV_routes": ("$KV.routes.*.*.*",),
            }
        ),
        *("$JS.API.STREAM.MSG.GET.KV_routes", "_INBOX.*.*.*.any.router-a.*"),
    ),
)
