"""All that a job's messages say of why they were sent: one tree, from the request to the last stop."""

from __future__ import annotations

import asyncio
from collections import Counter

from bus import subjects
from bus.subject_row import Subject
from bus.tap.causal_tree import CausalTree, TreeNode
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobState
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.patience import PATIENCE_S
from tests.waiting import beside

STEPS = 3
BEGINNING = (subjects.STEP_BEGIN, subjects.STEP_DISPATCH, subjects.NOTICE)
"""Of the way to each claim; further hops follow, and answers that made room for one."""
OF_ITSELF = {
    subjects.INSTANCE_SAMPLE,
    subjects.HEARTBEAT,
    subjects.QOS_REPORT,
    subjects.REGISTRY_RECORD,
    subjects.ROUTE_TABLE,
    subjects.LOG,
    subjects.QUERY,
    subjects.BROKER_REQUEST,
    subjects.ACCOUNT_POSITION,
}
"""What is said of a job though nothing of it asked for it; tables, where a beat or a report changed them;
what a process reads and stores by way of a broker, as what it asks JetStream itself is no message at all."""


async def test_a_job_is_one_tree_of_messages(mesh: Mesh) -> None:
    job = tiny_job(parallel={"stages": 2, "replicas": 1}, training={"steps": STEPS})
    record, seen = await run_tapped(mesh, job)
    assert record.state is JobState.DONE
    tree = CausalTree(record.correlation)
    tree.add_all(seen)
    assert tree.gather() == [], "every cause was seen"
    nodes = list(tree.walk())
    chains = [chain_of(node) for node in nodes if row_of(node) is subjects.STEP_CLAIM]
    assert len(chains) >= 2 * STEPS * job.training.microbatches
    assert {chain[:3] for chain in chains} == {BEGINNING}
    counts = Counter(row_of(node) for node in nodes)
    assert counts[subjects.START_INSTANCE] >= 3
    assert counts[subjects.STEP_COMMIT] >= 2 * STEPS  # orders, and their answers
    started = [node for node in nodes if row_of(node) is subjects.REGISTRATION and node.depth == 2]
    assert {row_of(node.parent) for node in started} == {subjects.START_INSTANCE}
    assert {subjects.ACCESS, subjects.SUBMIT} <= {row_of(node) for node in tree.root.children}
    inside = {node.id for node in nodes}
    left = {
        tapped.row
        for tapped in seen
        if tapped.envelope and tapped.envelope.id not in inside and record.job in tapped.subject
    }
    assert left <= OF_ITSELF, [row.name for row in left - OF_ITSELF if row]


async def run_tapped(mesh: Mesh, job: object) -> tuple[JobRecord, list[TappedMessage]]:
    """A job's record at its end, and all that was said meanwhile."""
    seen: list[TappedMessage] = []
    ended = asyncio.Event()
    async with (
        mesh.bus("witness", EntityKind.TAP) as bus,
        # were inboxes among the patterns, an answer that overtook its request would be shown without it
        Tap(bus, (">", "$KV.>"), replies=True, limit=1_000_000) as tap,
    ):
        client = mesh.client

        async def keep() -> None:
            async for tapped in tap:
                seen.append(tapped)
                if tapped.row is subjects.FORGET_TOPOLOGY and tapped.answers:
                    ended.set()

        async with beside(keep()):
            submitted = await asyncio.to_thread(client.submit, job)
            record: JobRecord = await asyncio.to_thread(client.wait, submitted.job)
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            await bus.barrier()
        assert tap.dropped == 0
    return record, seen


def row_of(node: TreeNode | None) -> Subject | None:
    return None if node is None or node.tapped is None else node.tapped.row


def chain_of(node: TreeNode) -> tuple[Subject | None, ...]:
    found: list[Subject | None] = []
    above: TreeNode | None = node
    while above is not None and above.tapped is not None:
        found.insert(0, above.tapped.row)
        above = above.parent
    return tuple(found)
