"""`dmsc policy state`: what a module has learnt, as it is kept on the bus (ADR-0100)."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import ModuleArgument

if TYPE_CHECKING:
    from schemas.learnt_state import LearntState, LearntStates

COLUMNS = ("owner", "version", "revision", "digest", "bytes", "schema", "source", "by", "at", "about")


def state(
    module: ModuleArgument,
    version: Annotated[str | None, option("--version TEXT", "Only of this version.")] = None,
    reset: Annotated[bool, option("--reset", "Have it forget what it has learnt.")] = False,
    publish: Annotated[
        Path | None, option("--publish FILE", "Have it go on from this file of `dmsc policy train`.")
    ] = None,
    reason: Annotated[str, option("--reason TEXT", "Why; it is kept with the state.")] = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show what a module has learnt, or replace it. A running module goes on from the new state at once.

    The state before is kept aside. With --json the states themselves are shown.

    Example: dmsc policy state routing-bandit --json
    """
    if reset and publish is not None:
        raise bad_input("--reset or --publish, not both")
    if publish is not None:
        _publish(mesh, module, publish, version, reason)
        return
    if reset:
        states = mesh.ask(
            lambda client: client.replace_learnt_state(module, None, version=version, reason=reason)
        )
    else:
        states = mesh.ask(lambda client: client.learnt_states(module, version=version))
    if not states.states and not states.aside:
        which = f"{module} {version}" if version else module
        mesh.show(states, f"{which}: nothing that it learnt is kept")
        return
    _show(mesh, states)


def _publish(mesh: GatewayQuery, module: str, file: Path, version: str | None, reason: str) -> None:
    from schemas.errors import BadInput
    from schemas.learnt_state import read_trained

    try:
        trained = read_trained(file.read_bytes())
    except OSError as error:
        raise bad_input(f"{file}: {error.strerror or error}") from None
    except BadInput as error:
        raise bad_input(f"{file}: {error.text}") from None
    if trained.module != module:
        raise bad_input(f"{file}: it is a state of {trained.module}, not of {module}")
    states = mesh.ask(
        lambda client: client.replace_learnt_state(
            module,
            trained.data,
            version=version or trained.version,
            schema_version=trained.schema_version,
            reason=reason or trained.reason,
        )
    )
    _show(mesh, states)


def _show(mesh: GatewayQuery, states: LearntStates) -> None:
    rows = [_row(state, aside=False) for state in states.states]
    rows += [_row(state, aside=True) for state in states.aside]
    mesh.show_table(states.model_dump(mode="json"), COLUMNS, rows)


def _row(state: LearntState, *, aside: bool) -> tuple[str, ...]:
    at = datetime.datetime.fromtimestamp(state.at).astimezone()
    about = f"kept aside: {state.reason}" if aside else state.damage or state.reason
    return (
        state.owner,
        state.version,
        str(state.revision),
        state.digest[:12],
        str(len(state.data.encode())),
        str(state.schema_version),
        state.source.value,
        state.by,
        at.isoformat(sep=" ", timespec="seconds"),
        about,
    )
