"""`dmsc replay`: runs a policy against a recorded run, without a mesh."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import BusQuery
from dmsc.console.options import print_json, print_table, print_text
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from dmsc.replay.recordings import Archive
    from dmsc.replay.session import Session, Story
    from dmsc.state.settings import BusAddress


def replay(
    run: Annotated[str, argument("RUN", "An exported run file, or a job's id.")],
    policy: Annotated[
        str,
        option(
            "--policy FILE.py|NAME",
            "Your file (FILE.py:Class if it has several policies), or the name of a built-in policy.",
            show_default=False,
        ),
    ],
    bus: BusQuery = BusQuery(),
) -> None:
    """Run a policy against a recorded run; compare its suggestions with the recorded ones, and score both.

    The policy receives the record in its order and with its times, as fast as it can. The same record and
    policy print the same output; the elapsed time goes to stderr. The column `the rules would say` shows what
    the orchestrator would have decided if this policy had been the only active one.

    Example: dmsc replay j4f2a1.dmscrun --policy my_policy.py
    """
    from dmsc.process.policy_loading import load_policy
    from dmsc.replay.present import (
        COLUMNS,
        FAULT_COLUMNS,
        SCORE_COLUMNS,
        as_json,
        fault_rows,
        rows,
        score_rows,
    )
    from dmsc.replay.session import Session

    candidate = load_policy(policy)
    key = (candidate.name, candidate.version)
    session = Session(candidate)
    began = time.perf_counter()
    story = run_async(feed(session, run, bus.address_or_none(), bus.archive()))
    took_s = time.perf_counter() - began
    if bus.json:
        print_json(as_json(story, key))
    else:
        print_table(COLUMNS, rows(story))
        print()
        if faults := fault_rows(story):
            print_table(FAULT_COLUMNS, faults)
            print()
        recorded = score_rows(story.scores)
        print_table(SCORE_COLUMNS, [*score_rows({key: story.replayed_scores}, key), *recorded])
    _remark(story, took_s)


async def feed(session: Session, run: str, address: BusAddress | None, archive: Archive) -> Story:
    """Feed the whole record to the session, and return the session's story."""
    from dmsc.replay.recordings import open_recording

    async with open_recording(run, address, archive) as recording:
        async for frame in recording.frames:
            session.feed(frame)
    return session.finish()


def _remark(story: Story, took_s: float) -> None:
    for problem in story.problems:
        print_text(f"dmsc: the policy failed in {problem.where}: {problem.text}", error=True)
    if story.unanswered_reads:
        print(
            f"dmsc: {story.unanswered_reads} reads of local stores: a record has no answers to them",
            file=sys.stderr,
        )
    if story.unreadable:
        print(f"dmsc: {story.unreadable} messages of other versions were passed over", file=sys.stderr)
    span_s = story.until - story.began
    print(
        f"{story.messages:,} messages, {span_s:.0f} s of the run in {took_s:.2f} s: "
        f"{span_s / took_s:.0f} times as fast as real time",
        file=sys.stderr,
    )
