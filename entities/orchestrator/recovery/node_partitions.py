"""A job on two nodes that do not reach each other (ADR-0020): one side goes on, the other is given up.

`partition` decides what a partition is and which side is kept. This service asks whether both nodes answer on
the bus, and carries the decision out: instances of the side that is given up are fenced, and replaced where
the others can reach them.
"""

from __future__ import annotations

import time

from bus.logs import get_logger
from bus.subjects import JUDGE
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.recovery.failure_handling import FailureHandling
from entities.orchestrator.recovery.partition import (
    FailedEdges,
    Node,
    NodePartition,
    Side,
    choose_side,
    name,
)
from entities.orchestrator.recovery.replacement import Replacement
from entities.orchestrator.step.step_owner import StepOwner
from schemas.cluster import Judge
from schemas.errors import DmscError
from schemas.job import NodeCut
from schemas.step import Member

log = get_logger("orchestrator")


class NodePartitions:
    """The network partitions of one job. `silence` returns at once."""

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        replacement: Replacement,
        failure_handling: FailureHandling,
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._replacement = replacement
        self._failure_handling = failure_handling
        self._edges = FailedEdges()
        self._asking: set[tuple[Node, Node]] = set()

    def silence(self, witness: Member, peer: Member) -> None:
        """`witness` got no answer from `peer` at the address that `peer` gives."""
        if not (self._job.instances.is_present(witness) and self._job.instances.is_present(peer)):
            return
        here, there = self._replacement.node_of(witness.sid), self._replacement.node_of(peer.sid)
        pair = ((witness, here), (peer, there))
        alone = [member for member, node in pair if self._stage_members(node) <= {member}]
        cut = self._edges.silence(witness, here, peer, there, alone, time.monotonic())
        if cut is not None and (cut.first, cut.second) not in self._asking:
            self._asking.add((cut.first, cut.second))
            self._job.tasks.spawn(self._take(cut))

    async def _take(self, cut: NodePartition) -> None:
        try:
            if all([await self._answers(node) for node in (cut.first, cut.second)]):
                self._act(cut)
            else:
                log.info("no cut: a node does not answer", job=self._job.name, cut=str(cut))
        finally:
            self._edges.forget(cut)
            self._asking.discard((cut.first, cut.second))

    async def _answers(self, node: Node) -> bool:
        """Whether the node's agent answers: a dead node is no partition."""
        agent = self._job.mesh.agent_of(*node)
        someone = next(iter(self._at(node)), None)
        if agent is None or someone is None:
            return False
        query = Judge(job=self._job.name, sid=someone.sid, incarnation=someone.incarnation)
        try:
            await self._job.bus.command(
                JUDGE, query, deadline_s=self._job.times.recovery.agent_s, while_heard=True, agent=agent
            )
        except DmscError:
            return False
        return True

    def _act(self, cut: NodePartition) -> None:
        best, rest, why = choose_side(self._side(cut.first, cut.second), self._side(cut.second, cut.first))
        lost = sorted(self._at(rest.node), key=lambda member: member.sid)
        if not lost or not best.instances:
            return  # the instances were moved, or lost, while the agents were asked
        text = (
            f"{cut}, but both answer on the bus: {name(best.node)} is kept ({why}), "
            f"{len(lost)} instances on {name(rest.node)} are replaced elsewhere"
        )
        if not best.room:
            text += ", as soon as there is room"
        log.warning("nodes cut off from each other", job=self._job.name, reason=text)
        self._replacement.avoid(NodeCut(kept=best.node, given_up=rest.node, at=time.time(), reason=str(cut)))
        agent = self._job.mesh.agent_of(*rest.node)
        if agent is not None:
            self._job.faults.partitioned(
                agent, text, step=self._step_owner.step, attempt=self._step_owner.attempt
            )
        self._job.events.partitioned(text, self._replacement.cuts)
        self._failure_handling.losing(lost, f"cut off from node {name(best.node)}")

    def _side(self, node: Node, other: Node) -> Side:
        stages = self._step_owner.stages if self._step_owner.running else self._job.instances.stages()
        beyond = self._at(other)
        return Side(
            node=node,
            instances=len(self._at(node)),
            stages=sum(any(member not in beyond for member in members) for members in stages),
            room=self._replacement.fits_without(other),
        )

    def _at(self, node: Node) -> set[Member]:
        return {
            member
            for member in self._job.instances.members.values()
            if self._job.instances.is_present(member) and self._replacement.node_of(member.sid) == node
        }

    def _stage_members(self, node: Node) -> set[Member]:
        """The stage members on a node; data instances have links to the first stage only."""
        graph = self._job.instances.graph
        return {member for member in self._at(node) if not graph.unit(member.sid).is_data}
