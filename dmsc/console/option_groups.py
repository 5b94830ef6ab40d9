"""Options that many commands take together: where a gateway or the bus is, and how the answer is printed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    JsonOption,
    StateOption,
    TokenOption,
    print_json,
    print_table,
    print_text,
)
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.replay.recordings import Archive
    from dmsc.state.settings import BusAddress

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JsonOutput:
    """How a command prints its result: for people, or as JSON for programs."""

    json: JsonOption = False

    def show(self, value: Any, *lines: str) -> None:
        """Print the value as JSON, or these lines."""
        if self.json:
            print_json(value)
        else:
            for line in lines:
                print_text(line)

    def show_table(self, value: Any, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print the value as JSON, or these rows."""
        if self.json:
            print_json(value)
        else:
            print_table(columns, rows)


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """The gateway that a command asks, and the user's token."""

    gateway: GatewayOption = None
    token: TokenOption = None
    state: StateOption = None

    def client(self, **limits: float) -> AsyncClient:
        """A client of this gateway. `limits` are those of `AsyncClient`."""
        from dmsc.client.async_client import AsyncClient

        return AsyncClient(self.gateway, token=self.token, state=self.state, **limits)

    def ask(self, request: Callable[[AsyncClient], Awaitable[T]], *, answer_s: float = 20.0) -> T:
        """Run a command that needs only a client.

        It waits `answer_s` seconds for each answer, which is longer than an orchestrator's failover.
        """

        async def talk() -> T:
            async with self.client(timeout_s=answer_s) as client:
                return await request(client)

        return run_async(talk())


@dataclass(frozen=True, kw_only=True)
class GatewayQuery(JsonOutput, GatewayOptions):
    """The options of a command that prints a gateway's answer."""


@dataclass(frozen=True, kw_only=True)
class BusOptions:
    """The bus that a command reads."""

    bus: BusOption = None
    bus_token: BusTokenOption = None
    state: StateOption = None

    def address(self) -> BusAddress:
        """The bus's address. Raises `BusUnreachable` if none is known."""
        from dmsc.state.settings import find_bus

        return find_bus(self.bus, self.bus_token, self.state)

    def address_or_none(self) -> BusAddress | None:
        """The bus's address; None if no mesh runs and no bus was named."""
        from schemas.errors import BusUnreachable

        try:
            return self.address()
        except BusUnreachable:
            return None

    def archive(self) -> Archive:
        """The recorded runs in the state folder."""
        from dmsc.replay.recordings import Archive
        from dmsc.state.state_folder import default_state

        return Archive(self.state or default_state())


@dataclass(frozen=True, kw_only=True)
class BusQuery(JsonOutput, BusOptions):
    """The options of a command that prints what it reads from the bus."""
