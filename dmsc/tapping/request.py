"""The options of `dmsc tap`: each is spelled once, here, and the command line shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input


@dataclass(frozen=True, kw_only=True)
class TapRequest:
    """The options of a tap, as typed.

    Raises:
        BadInput: Two options exclude each other.
    """

    patterns: Annotated[
        tuple[str, ...],
        argument(
            "[PATTERN]...", "Subjects, for example 'signal.>', 'step.claim.*.*', '$KV.jobs.>' (all subjects)."
        ),
    ] = (">",)
    filters: Annotated[
        tuple[str, ...],
        option(
            "--filter FIELD=VALUE",
            "Only messages with this value, for example sender.name=gateway-*; also with !=, < and >;"
            " repeatable.",
        ),
    ] = ()
    replies: Annotated[bool, option("--replies", "Also show replies to requests.")] = False
    rate: Annotated[bool, option("--rate", "Show messages and bytes per second instead of messages.")] = False
    sample: Annotated[
        float | None,
        option(
            "--sample SHARE",
            "Show only this share of the messages, e.g. 0.1. The choice depends only on message ids, so"
            " it is the same each time. What a shown message caused is shown, too, if this tap saw all"
            " messages in between.",
        ),
    ] = None
    microbatch: Annotated[
        str | None, option("--microbatch JOB/STEP/M", "Follow one microbatch through its hops.")
    ] = None
    follow: Annotated[
        str | None,
        option(
            "--follow ID",
            "Show the tree of messages that this message caused, first from the streams, then live."
            " --ids shows ids.",
        ),
    ] = None
    past: Annotated[bool, option("--past", "With --follow: show only messages in the streams, then end.")] = (
        False
    )
    record: Annotated[
        Path | None, option("--record FILE", "Also write what is shown to a new file, redacted.")
    ] = None
    read: Annotated[
        Path | None, option("--read FILE", "Read a recorded tap file or run file instead of the bus.")
    ] = None
    ids: Annotated[bool, option("--ids", "Also show the id of each message and of its cause.")] = False
    raw: Annotated[bool, option("--raw", "Show bytes instead of decoded messages.")] = False
    count: Annotated[int | None, option("--count -n N", "End after N messages.", min=1)] = None

    def __post_init__(self) -> None:
        modes = {"--rate": self.rate, "--microbatch": self.microbatch, "--follow": self.follow}
        chosen = [name for name, value in modes.items() if value]
        if len(chosen) > 1:
            raise bad_input(f"{chosen[0]} and {chosen[1]} exclude each other: give one of them")
        if self.past and not self.follow:
            raise bad_input("--past goes with --follow ID")
        if chosen and self.sample is not None:
            raise bad_input(f"--sample does not go with {chosen[0]}, which needs every message")
        if chosen and self.record is not None:
            raise bad_input(f"--record does not go with {chosen[0]}: record, then --read FILE {chosen[0]} …")
