"""What the loop sees of a job's run: figures of its steps, links by Type 5, and free slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.automation.situation_reading import (
    alike,
    free_slots,
    mesh_figures,
    read_situation,
)
from entities.orchestrator.membership.measured_speeds import MeasuredSpeeds
from entities.orchestrator.membership.recut_plan import InstancePace
from entities.orchestrator.planning.change_account import ChangeAccount
from schemas.job import JobState
from schemas.signals import CommunicationPolicy, LinkReport, QosReport, StagePolicy
from schemas.step import Member, MicrobatchClaim
from schemas.telemetry import LinkFigures
from tests.builders.graphs import graph, node, placement, unit
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec, step_result
from tests.job_context import job_context

SIDS = ("j-s0-r0", "j-s0-r1", "j-s1-r0", "j-s1-r1")
MEMBERS = tuple(Member(sid=sid, incarnation="i") for sid in SIDS)


class Run:
    """A running job on slots 0 to 3 of a node with six, of which one is another job's."""

    def __init__(self, **sections: Any) -> None:
        given = spec(
            parallel={"stages": 2, "replicas": 2}, training={"microbatches": 4, "steps": 50}, **sections
        )
        record = job_record("j", spec=given).model_copy(update={"state": JobState.RUNNING})
        slots = [
            slot.model_copy(update={"speed": {"stage": 1.0}, "labels": {"price": str(slot.index)}})
            for slot in node("a", slots=6).slots
        ]
        self.node = node("a", slots=6).model_copy(update={"slots": tuple(slots)})
        places = tuple(
            placement(sid, slot, cluster=self.node.cluster, node=self.node.node)
            for slot, sid in enumerate(SIDS)
        )
        self.graph = graph(*map(unit, SIDS), placements=places)
        fields: dict[str, Any] = {"job": "j", "revision": 1, "entry_gateway": "g", "clusters": ("a",)}
        policy = CommunicationPolicy(
            **fields, stages=tuple(StagePolicy(stage=stage, window=3) for stage in range(2)), reason="initial"
        )
        policies = SimpleNamespace(
            policy=policy, weights=lambda: {0: {"j-s0-r0": 1.0}}, windows=lambda: {0: 3, 1: 3}
        )
        self.mesh: Any = SimpleNamespace(
            nodes={self.node.sid: self.node},
            agent_of=lambda cluster, name: self.node.sid,
            links=SimpleNamespace(bytes_per_s=dict),
            cordons=SimpleNamespace(places=dict),
            quality={},
            open_nodes=lambda: [self.node],
            records={},
        )
        instances = SimpleNamespace(
            graph=self.graph,
            deployed=self.graph,
            lost=set(),
            placements=places,
            agent_of=lambda sid: self.node.sid,
        )
        self.job = job_context(record, policies=policies, instances=instances, mesh=self.mesh)
        self.measured, self.account = MeasuredSpeeds(), ChangeAccount()
        self.missing: list[str] = []
        self.training = SimpleNamespace(
            stages=lambda: (MEMBERS[:2], MEMBERS[2:]),
            recutting=SimpleNamespace(measured=self.measured, missing=lambda: self.missing),
            changes=SimpleNamespace(leaving=frozenset()),
            job_changes=SimpleNamespace(account=self.account),
        )
        self.actions = SimpleNamespace(under_way="")
        self.model_analysis = SimpleNamespace(known=None)
        self.over, self.name, self.step = False, "j", 7

    def steps(self, count: int, step_s: float = 0.5, **took_ms: float) -> None:
        """Steps in which each member takes 50 ms for a microbatch, or what is given by `s0_r0`."""
        for number in range(count):
            claims = [
                MicrobatchClaim(
                    job="j",
                    epoch=1,
                    step=number,
                    attempt=0,
                    microbatch=microbatch,
                    stage=int(member.sid[3]),
                    owner=member,
                    upstream="x",
                    forward_ms=took_ms.get(member.sid[2:].replace("-", "_"), 50.0),
                )
                for member in MEMBERS
                for microbatch in range(2)
            ]
            self.measured.decided(claims, step_s, at=100.0 + step_s * number)
            self.account.decided(step_result(number, step_s=step_s, shares=dict.fromkeys(SIDS, 2)))

    @property
    def queue(self) -> Any:
        """Another job has slot 5; this one has 0 to 3."""
        other, own = placement("k-s0-r0", 5), self.job.instances.placements
        return SimpleNamespace(
            occupied=lambda job: {self.node.sid: (other,) if job == "j" else (other, *own)}
        )

    def needs(self, **figures: Any) -> None:
        """What each unit needs."""
        needs = self.graph.units[0].requirements.model_copy(update=figures)
        units = tuple(each.model_copy(update={"requirements": needs}) for each in self.graph.units)
        self.job.instances.graph = self.graph.model_copy(update={"units": units})

    def read(self, now: float = 102.0) -> Any:
        run: Any = self
        seen = read_situation(run, self.mesh, mesh_figures(self.mesh, self.queue), now)
        return None if seen is None else seen[0]

    def free(self) -> list[str]:
        run: Any = self
        idle = mesh_figures(self.mesh, self.queue).idle
        return [slot.slot for slot in free_slots(run, self.mesh, self.queue, idle)]


def test_figures_are_means_of_the_steps_with_their_errors() -> None:
    run = Run()
    run.steps(2)
    run.steps(3, s0_r1=200.0)
    seen = run.read()
    fast, slow = seen.stages[0].instances
    assert (fast.microbatch_ms, fast.error_ms) == (50.0, 0.0)
    assert slow.microbatch_ms == pytest.approx(140.0)
    assert slow.error_ms > 0
    assert slow.slot == f"slot 1 of {run.node.cluster}/{run.node.node}"
    assert (seen.step_ms, seen.measured_steps, seen.microbatches) == (500.0, 5, 4)
    assert seen.busy == ""
    assert seen.best_cut is None, "nobody knows the model"


def test_while_somebody_is_missing_or_nothing_was_measured_there_is_nothing_to_see() -> None:
    run = Run()
    assert run.read() is None
    run.steps(5)
    run.missing = ["j-s0-r1"]
    assert run.read() is None
    run.missing, run.over = [], True
    assert run.read() is None


def test_the_account_says_when_it_is_too_soon() -> None:
    run = Run()
    run.steps(3)
    assert run.read().busy == "only 3 steps by this crew are known: nothing to compare with"


def test_links_are_those_of_type_5() -> None:
    run = Run()
    run.steps(5)
    links = tuple(
        LinkReport(sender="j-s0-r0", receiver=receiver, figures=LinkFigures(transfer_ms=transfer_ms))
        for receiver, transfer_ms in (("j-s1-r0", 40.0), ("j-s1-r1", 2.0), ("k-s1-r0", 90.0))
    )
    run.mesh.quality["router-a", "j"] = QosReport(
        sid="router-a", cluster="a", window_s=5.0, job="j", links=links
    )
    seen = run.read()
    assert [stage.link_ms for stage in seen.stages] == [0.0, 40.0]
    assert [stage.window for stage in seen.stages] == [3, 3]


def test_free_slots_are_nobodys_and_no_dearer_where_the_job_counts_money() -> None:
    where = Run().node
    assert Run().free() == [f"slot 4 of {where.cluster}/{where.node}"]
    assert Run(automation={"objective": "cost"}).free() == [], "it costs more than the dearest of the job"


def test_what_a_newcomer_takes_follows_the_measured_links_of_the_mesh() -> None:
    run = Run()
    run.steps(5)
    run.needs(memory_bytes=10_000_000)
    unmeasured = run.read().stages[0].joins_ms
    run.mesh.links = SimpleNamespace(bytes_per_s=lambda: {("a", "b"): 1e6, ("b", "a"): 1e6})
    assert unmeasured == pytest.approx(2100.0)
    assert run.read().stages[0].joins_ms == pytest.approx(12_000.0)


def test_a_better_cut_is_asked_for_where_stages_are_uneven_and_not_again_by_like_figures() -> None:
    run = Run()
    asked: list[dict[Member, float]] = []
    recutting: Any = run.training.recutting
    recutting.question = lambda message, topology, took: asked.append(took) or SimpleNamespace()
    run.model_analysis.known = object()
    run.needs(cost_ms=50.0)
    run.steps(5)
    assert not run.read().uneven
    assert asked == []
    run.steps(5, s0_r0=200.0, s0_r1=200.0)
    assert run.read().uneven
    assert asked[0][MEMBERS[0]] == 200.0, "as the latest steps agree, not the mean"
    paces = [[InstancePace(50.0, 1.0)], [InstancePace(100.0, 1.0)]]
    assert alike(paces, [[InstancePace(53.0, 1.0)], [InstancePace(100.0, 1.0)]])
    assert not alike(paces, [[InstancePace(50.0, 1.0)], [InstancePace(120.0, 1.0)]])
    assert not alike(paces, [[InstancePace(50.0, 1.0), InstancePace(50.0, 1.0)], paces[1]])
