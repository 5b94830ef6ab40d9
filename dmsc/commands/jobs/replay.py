"""`dmsc replay`: a recorded run against a policy, without a mesh."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.commands.jobs.runs import bus_or_none
from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    JsonOption,
    StateOption,
    print_json,
    print_table,
    print_text,
)
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from dmsc.replay.recordings import Archive
    from dmsc.replay.session import Session, Story
    from dmsc.state.settings import BusAddress


def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="An exported file, or a job's id.", show_default=False)
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="FILE.py|NAME",
            help="Your file (FILE.py:Class if it has several), or a built-in name.",
            show_default=False,
        ),
    ],
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Run a policy against a recorded run: its suggestions beside those made then, and what each was worth.

    The record is fed to it in its own order with its own times, as fast as it goes; the same record and
    policy print the same. How long it took goes to stderr. `the rules would say`: the orchestrator's
    arbitration, if this policy had been the only active one.

    Example: dmsc replay j4f2a1.dmscrun --policy my_policy.py
    """
    from dmsc.process.policy_loading import load_policy
    from dmsc.replay.present import COLUMNS, SCORE_COLUMNS, as_json, rows, score_rows
    from dmsc.replay.recordings import Archive
    from dmsc.replay.session import Session
    from dmsc.state.state_folder import default_state

    tried = load_policy(policy)
    key = (tried.name, tried.version)
    session = Session(tried)
    began = time.perf_counter()
    story = run_async(
        feed(session, run, bus_or_none(bus, bus_token, state), Archive(state or default_state()))
    )
    took_s = time.perf_counter() - began
    if json:
        print_json(as_json(story, key))
    else:
        print_table(COLUMNS, rows(story))
        print()
        theirs = score_rows(story.scores)
        print_table(SCORE_COLUMNS, [*score_rows({key: story.replayed_scores}, key), *theirs])
    _remark(story, took_s)


async def feed(session: Session, run: str, address: BusAddress | None, archive: Archive) -> Story:
    """All of the record through the session."""
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
