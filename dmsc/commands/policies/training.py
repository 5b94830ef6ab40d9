"""`dmsc policy train`: learnt states of modules from recorded runs (ADR-0100)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import BusQuery, GatewayOptions
from dmsc.console.options import GatewayOption, TokenOption
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from policies.training import Trained
    from schemas.learnt_state import LearntState

COLUMNS = ("module", "examples", "held out", "loss now", "loss trained", "unit", "about")


def train(
    records: Annotated[
        list[str],
        argument("RECORDS", "Exported runs, tap files, or ids of jobs in the mesh or the archive."),
    ],
    module: Annotated[
        list[str] | None, option("--module MODULE", "Only this module; repeatable (all that can be trained).")
    ] = None,
    seed: Annotated[int, option("--seed", "Of what is held out and of the training.", min=0)] = 0,
    out: Annotated[
        Path | None,
        option("--out FILE", "Write the trained state there; `dmsc policy state MODULE --publish` takes it."),
    ] = None,
    publish: Annotated[
        bool, option("--publish", "Have the mesh's modules go on from the trained states that are better.")
    ] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusQuery = BusQuery(),
) -> None:
    """Train modules from recorded runs, and show how well they do on held-out parts, before and after.

    Of three and more runs whole runs are held out, of fewer the last part of each. The same records and seed
    give the same state, byte for byte. Losses: less is better.

    Example: dmsc policy train night.dmscrun --module transience --out transience.json
    """
    from dmsc.replay.training import read_runs
    from policies.training import TRAINERS
    from policies.training import train as train_module
    from schemas.errors import BadInput

    names = module or sorted(TRAINERS)
    if unknown := [name for name in names if name not in TRAINERS]:
        raise bad_input(
            f"{unknown[0]} can't be trained from records; there are: {', '.join(sorted(TRAINERS))}"
        )
    if out is not None and len(names) != 1:
        raise bad_input("--out takes the state of one module: name it with --module")
    mesh = GatewayOptions(gateway=gateway, token=token, state=bus.state)
    address = bus.address_or_none()
    runs = run_async(read_runs(records, address, bus.archive()))
    asks = publish or gateway is not None or address is not None
    trained: list[Trained] = []
    refused: list[tuple[str, str]] = []
    for name in names:
        now = _kept(mesh, name, TRAINERS[name].policy.version) if asks else ""
        try:
            trained.append(train_module(TRAINERS[name](), runs, now, seed=seed))
        except BadInput as error:
            refused.append((name, error.text))
    if not trained and len(names) == 1:
        raise bad_input(refused[0][1])
    if out is not None:
        _write(out, trained[0], records)
    about = dict(refused)
    for one in trained:
        about[one.module] = "better" if one.better else "no better: the present state is kept"
        if publish and one.better:
            _publish(mesh, one, records)
            about[one.module] = "better, published"
    documents = [_document(one, about[one.module]) for one in trained]
    documents += [{"module": name, "about": text} for name, text in refused]
    rows = [_row(one, about[one.module]) for one in trained]
    rows += [(name, "", "", "", "", "", text) for name, text in refused]
    bus.show_table(documents, COLUMNS, rows)
    if not trained:
        raise bad_input("no module was trained: the records hold too little for each")
    if publish and not any(one.better for one in trained):
        raise bad_input("nothing published: no trained state is better on what was held out")


def _kept(mesh: GatewayOptions, module: str, version: str) -> str:
    """The state that the mesh keeps of this module's version; empty if none, or nobody can be asked."""
    from schemas.errors import Unavailable

    try:
        states = mesh.ask(lambda client: client.learnt_states(module, version=version)).states
    except Unavailable:
        return ""
    return states[0].data if states and not states[0].damage else ""


def _publish(mesh: GatewayOptions, trained: Trained, records: list[str]) -> None:
    mesh.ask(
        lambda client: client.replace_learnt_state(
            trained.module,
            trained.data,
            version=trained.version,
            schema_version=trained.schema_version,
            reason=_reason(trained, records),
        )
    )


def _write(file: Path, trained: Trained, records: list[str]) -> None:
    from schemas.learnt_state import LearntSource, LearntState, digest_of

    now = time.time()
    state: LearntState = LearntState(
        module=trained.module,
        version=trained.version,
        schema_version=trained.schema_version,
        revision=1,
        digest=digest_of(trained.data),
        data=trained.data,
        at=now,
        source=LearntSource.TRAINED,
        by="dmsc policy train",
        reason=_reason(trained, records),
    )
    try:
        file.write_text(state.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise bad_input(f"{file}: {error.strerror or error}") from None


def _reason(trained: Trained, records: list[str]) -> str:
    shown = ", ".join(Path(record).name for record in records[:3])
    more = f" and {len(records) - 3} more" if len(records) > 3 else ""
    return f"trained on {trained.examples} examples of {shown}{more}"[:400]


def _document(trained: Trained, about: str) -> dict[str, object]:
    from schemas.learnt_state import digest_of

    return {
        "module": trained.module,
        "version": trained.version,
        "examples": trained.examples,
        "held_out": trained.held_out,
        "loss_now": trained.loss_now,
        "loss": trained.loss,
        "unit": trained.unit,
        "digest": digest_of(trained.data),
        "about": about,
    }


def _row(trained: Trained, about: str) -> tuple[str, ...]:
    return (
        trained.module,
        str(trained.examples),
        str(trained.held_out),
        f"{trained.loss_now:.4f}",
        f"{trained.loss:.4f}",
        trained.unit,
        about,
    )
