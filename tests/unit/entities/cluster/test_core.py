"""A node agent's decisions: slots, exits, judgements."""

from __future__ import annotations

from typing import Any

import pytest

from entities.cluster.capabilities.slots import offer_slots
from entities.cluster.core import (
    ENDED_KEPT,
    Exit,
    LocalIncarnation,
    ProcessLedger,
    ProcessObservation,
    ProcessWork,
    broken_dependencies,
    explain_exit,
    judge_process,
    process_state,
)
from schemas.cluster import InstanceStart
from schemas.errors import Conflict, Fenced, Refused
from schemas.registry import InstanceState
from schemas.task_graph import LayerEdge
from tests.builders.graphs import layer, start, topology, unit

GIB = 1 << 30


def order(sid: str = "j-s1-r0", **more: Any) -> InstanceStart:
    """Of the second of three stages, if it is of no other."""
    fields = {"incarnation": "i1", "stages": 3, "layer_count": 6} | more
    return start(unit(sid, first_layer=2, last_layer=4), **fields)


def ledger(slots: int = 2) -> ProcessLedger:
    return ProcessLedger(slots=offer_slots((), slots, 2, 8 * GIB))


def admitted(
    start: InstanceStart, before: ProcessLedger | None = None
) -> tuple[ProcessLedger, LocalIncarnation]:
    after, held = (before or ledger()).admit(start, "a-n")
    assert held is not None
    return after, held


def busy(ledger: ProcessLedger) -> list[str | None]:
    return [slot.busy_with for slot in ledger.slots]


class TestLedger:
    def test_a_stage_takes_its_slot_and_data_takes_none(self) -> None:
        after, held = admitted(order(slot=1))
        assert (held.slot, busy(after)) == (1, [None, "j-s1-r0"])
        after, data = admitted(order("j-data-r0", slot=1), after)
        assert (data.slot, busy(after)) == (None, [None, "j-s1-r0"])

    def test_a_repeat_changes_nothing(self) -> None:
        after, _ = admitted(order())
        assert after.admit(order(), "a-n") == (after, None)

    @pytest.mark.parametrize(
        ("start", "error", "text"),
        [
            (order("j-s1-r1"), Refused, "slot 0 is held by j-s1-r0; choose another"),
            (order("j-s1-r1", slot=2), Refused, "no slot 2 for j-s1-r1, there are 2"),
            (order(incarnation="i2", slot=1), Conflict, "j-s1-r0 runs here as incarnation i1"),
            (order("j-s1-r1", slot=1, epoch=0), Fenced, "is of epoch 0, the job is at epoch 1"),
        ],
    )
    def test_refusals_are_one_line_with_the_place(
        self, start: InstanceStart, error: type[Exception], text: str
    ) -> None:
        after, _ = admitted(order())
        with pytest.raises(error, match=f"^a-n: .*{text}") as caught:
            after.admit(start, "a-n")
        assert "\n" not in str(caught.value)

    def test_an_ended_incarnation_never_starts_again_but_a_new_one_does(self) -> None:
        after, held = admitted(order())
        after = after.release(held, "killed by SIGKILL")
        assert busy(after) == [None, None]
        with pytest.raises(Conflict, match="has ended: killed by SIGKILL"):
            after.admit(order(), "a-n")
        after, _ = admitted(order(incarnation="i2"), after)
        assert busy(after) == ["j-s1-r0", None]

    def test_one_that_never_came_to_be_may_be_tried_again(self) -> None:
        after, held = admitted(order())
        admitted(order(), after.withdraw(held))

    def test_a_late_report_on_an_ended_incarnation_brings_nothing_back(self) -> None:
        after, held = admitted(order())
        after = after.release(held, "gone")
        assert after.spawned(held, 7) is after
        assert after.order_end(held) is after

    def test_slots_offered_anew_keep_their_holders(self) -> None:
        after, _ = admitted(order(slot=1))
        again = after.with_slots(offer_slots((), 3, 2, 8 * GIB))
        assert busy(again) == [None, "j-s1-r0", None]

    def test_only_so_many_ended_incarnations_are_remembered(self) -> None:
        after = ledger()
        for number in range(ENDED_KEPT + 5):
            after, held = admitted(order(incarnation=f"i{number}"), after)
            after = after.release(held, "gone")
        assert len(after.ended) == ENDED_KEPT
        assert after.find_ended("j-s1-r0", "i4") is None
        assert after.find_ended("j-s1-r0", "i5") is not None

    def test_a_forgotten_job_starts_from_any_epoch(self) -> None:
        after, held = admitted(order(epoch=5))
        after = after.release(held, "gone").forget("j")
        admitted(order(epoch=1, incarnation="i2"), after)


@pytest.mark.parametrize(
    ("ordered", "exit", "state", "reason"),
    [
        (True, Exit(signal="SIGKILL", last_line="x"), "gone", "stopped as ordered (killed by SIGKILL)"),
        (False, Exit(code=0, last_line="x"), "gone", "ended by itself with exit code 0"),
        (False, Exit(code=3), "faulted", "exit code 3"),
        (False, Exit(signal="SIGSEGV", last_line="x"), "faulted", "killed by SIGSEGV; last log line: x"),
        (
            False,
            Exit(code=1, last_line='{"event": "link lost", "level": "info", "reason": "closed", "to": "b"}'),
            "faulted",
            "exit code 1; last log line: link lost: closed",
        ),
        (
            False,
            Exit(code=1, last_line='{"event": "failed", "exception": "Traceback:\\n  x\\nValueError: no"}'),
            "faulted",
            "exit code 1; last log line: failed: ValueError: no",
        ),
        (False, Exit(code=1, last_line="{torn"), "faulted", "exit code 1; last log line: {torn"),
        (False, Exit(code=1, last_line="[1]"), "faulted", "exit code 1; last log line: [1]"),
        (False, Exit(), "faulted", "for want of others: lost with the fork server"),
        (False, Exit(code=75), "faulted", "for want of others: exit code 75"),
    ],
)
def test_an_end_is_a_fault_unless_ordered_or_clean(
    ordered: bool, exit: Exit, state: str, reason: str
) -> None:
    after, held = admitted(order())
    if ordered:
        after = after.order_end(held)
    assert explain_exit(after.instances[held.sid], exit) == (InstanceState(state), reason)


TOPOLOGY = topology(
    *(layer(index, name=f"l{index}", output_bytes=100 + index) for index in range(6)), input_bytes=32
)


class TestJudgement:
    """Draft §5.5: which dependencies a fault disrupts, and how far it reaches."""

    @pytest.mark.parametrize(
        ("status", "process", "scope", "kind", "broken"),
        [
            ("running", "running", "none", "transient", 0),
            ("sleeping", "running", "none", "transient", 0),
            ("disk-sleep", "running", "none", "transient", 0),
            ("stopped", "stopped", "instance", "transient", 2),
            ("tracing-stop", "stopped", "instance", "transient", 2),
            ("zombie", "gone", "instance", "structural", 2),
        ],
    )
    def test_by_process_state(self, status: str, process: str, scope: str, kind: str, broken: int) -> None:
        after, held = admitted(order())
        after = after.spawned(held, 7)
        found = judge_process(
            "j-s1-r0", "i1", ledger=after, observation=process_state(status, 7, 1.5), warm=True, topology=None
        )
        assert (found.process, found.scope, found.kind, len(found.broken)) == (process, scope, kind, broken)
        assert found.evidence == f"process 7 is {status}, 1.5 s of CPU time used"

    def test_without_a_fork_server_the_whole_node_is_affected(self) -> None:
        after, held = admitted(order())
        after = after.release(held, "lost with the fork server")
        found = judge_process("j-s1-r0", "i1", ledger=after, observation=None, warm=False, topology=None)
        assert (found.process, found.scope, found.evidence) == ("gone", "node", "lost with the fork server")

    def test_one_being_started_is_not_at_fault(self) -> None:
        after, _ = admitted(order())
        found = judge_process("j-s1-r0", "i1", ledger=after, observation=None, warm=True, topology=None)
        assert (found.process, found.scope, found.evidence) == ("running", "none", "being started")

    def test_a_process_that_does_not_exist_is_gone_before_its_exit_is_reported(self) -> None:
        after, held = admitted(order())
        gone = ProcessObservation(state="gone", note="process 7 does not exist")
        found = judge_process(
            "j-s1-r0", "i1", ledger=after.spawned(held, 7), observation=gone, warm=True, topology=None
        )
        assert (found.process, found.kind) == ("gone", "structural")

    def test_another_incarnation_is_named(self) -> None:
        after, _ = admitted(order())
        found = judge_process("j-s1-r0", "i0", ledger=after, observation=None, warm=True, topology=None)
        assert (found.process, found.evidence) == ("unknown", "j-s1-r0 is here as incarnation i1")

    def test_the_topology_tells_what_flowed_over_the_broken_edges(self) -> None:
        _, held = admitted(order())
        assert broken_dependencies(held, TOPOLOGY) == (
            "stage 0 -> j-s1-r0: output of layer 1 (l1), 101 bytes a microbatch",
            "j-s1-r0 -> stage 2: output of layer 3 (l3), 103 bytes a microbatch",
        )
        _, data = admitted(order("j-data-r0"))
        assert broken_dependencies(data, TOPOLOGY) == ("j-data-r0 -> stage 0: 32 bytes a microbatch",)
        edges = (
            LayerEdge(upstream=0, downstream=1, bytes=9),
            LayerEdge(upstream=0, downstream=5, bytes=8),
            LayerEdge(upstream=4, downstream=6, bytes=7),
        )
        with_skips = broken_dependencies(held, TOPOLOGY.model_copy(update={"edges": edges}))
        assert with_skips[2:] == ("layer 0 (l0) -> layer 5 (l5): 8 bytes a microbatch",)
        _, last = admitted(order("j-s2-r0"))
        assert len(broken_dependencies(last, None)) == 1


def test_who_computes_or_moves_bytes_gets_on() -> None:
    before = ProcessWork(cpu_s=3.0, moved_bytes=10 << 20)
    assert not before.gets_on(before, 120.0)
    assert ProcessWork(3.0 + 120 * ProcessWork.LEAST_CORES, 10 << 20).gets_on(before, 120.0)
    assert ProcessWork(3.0, (10 << 20) + 120 * ProcessWork.LEAST_BYTES_PER_S).gets_on(before, 120.0)
    assert not ProcessWork(3.1, (10 << 20) + 1000).gets_on(before, 120.0), (
        "a line in a log now and then is no work"
    )
    assert not ProcessWork().gets_on(before, 120.0), "it is gone"
