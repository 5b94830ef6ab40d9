"""`dmsc policy …`: functional modules, from a new file to one that runs, is asked and is ordered about."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.commands.mesh.run import LevelOption, ParentOption, run_parts
from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    JsonOption,
    ModuleArgument,
    StateOption,
    TokenOption,
    TrustOption,
    print_json,
    print_table,
    print_text,
)
from dmsc.console.running import ask_gateway, run_async

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.module_status import ModuleStatus
    from schemas.observation import Observation
    from schemas.policy import ModuleLifecycle
import keyword
from importlib import resources

from schemas.base import is_token
from schemas.errors import BadInput

app = typer.Typer(
    help="Write a policy, add it to a running mesh, ask it, order it about.", no_args_is_help=True
)

VersionOption = Annotated[
    str | None, typer.Option("--version", metavar="TEXT", help="Which of several versions that run.")
]
JobsOption = Annotated[
    list[str], typer.Option("--job", metavar="JOB", help="Which job; repeatable.", show_default=False)
]


@app.command()
def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|NAME", help="Your file (FILE.py:Class if it has several), or a built-in name."
        ),
    ],
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Only watch: its suggestions are scored, none is adopted.")
    ] = False,
    job: Annotated[
        list[str] | None, typer.Option("--job", metavar="JOB", help="Only for this job; repeatable.")
    ] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    log_level: LevelOption = "info",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the bus at the start.")
    ] = 30.0,
    trust_researchers: TrustOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a policy as a functional module of the mesh, until Ctrl-C.

    Its suggestions go to the orchestrator, which adopts or declines each with a reason: see them with
    `dmsc tap 'policy.>'`. With your token it is yours: you may order it about, promote it and roll it back.

    Example: dmsc policy run examples/my_policy.py
    """
    import sys

    from dmsc.process.composition import policy_part
    from dmsc.state.settings import find_bus
    from dmsc.tapping.role import given_token

    # Thousands of instances' telemetry: the bus must get its turn while the policy's thread computes.
    sys.setswitchinterval(0.001)
    address = find_bus(bus, bus_token, state)
    given = None if parent is not None else given_token(token)
    owner, role = run_async(_user(gateway, given, state)) if given else ("", None)
    if parent is not None and not trust_researchers:  # whoever starts it at a shell has written it
        from dmsc.process.sandboxing import confine_module

        confine_module(source, state)
    part = policy_part(source, shadow=shadow, jobs=job or (), owner=owner, own_jobs=role == "researcher")
    run_parts([part], address, parent=parent, level=log_level, patience_s=wait)


async def _user(gateway: str | None, token: str, state: Path | None) -> tuple[str, str | None]:
    """Whose token it is, and their role; empty, with a line, where no gateway answers: the module is the
    mesh's own then."""
    from bus.logs import get_logger
    from dmsc.client.async_client import AsyncClient
    from dmsc.tapping.role import PATIENCE_S
    from schemas.errors import Unavailable

    try:
        async with AsyncClient(
            gateway, token=token, state=state, timeout_s=PATIENCE_S, patience_s=PATIENCE_S
        ) as client:
            about = await client.whoami()
            return about.user, about.role
    except Unavailable as error:
        get_logger("policy").warning(
            "whose module this is can't be asked; it is the mesh's", reason=error.text
        )
        return "", None


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The policy's name.", show_default=False)],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where to write it.", show_default="here")
    ] = Path(),
) -> None:
    """Write a policy that works, and its test, to change into your own.

    Example: dmsc policy new my-idea
    """

    file, test_file = write_policy(name, folder)
    print(f"{file}       dmsc policy run --shadow {file}")
    print(f"{test_file}  pytest {test_file}")


@app.command("list")
def list_(
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the functional modules that run, how they fare, and the built-in ones that could.

    Strikes are nonsense, floods, suggestions from long ago, and crashes.

    Example: dmsc policy list --json
    """
    from dmsc.process.policy_loading import BUILT_IN

    modules = ask_gateway(gateway, token, state, lambda client: client.policies())
    if json:
        rows = [{"name": one.module, **one.model_dump(mode="json"), "state": _state(one)} for one in modules]
        running = {one.module for one in modules}
        print_json(
            [*rows, *({"name": name, "state": "not running"} for name in BUILT_IN if name not in running)]
        )
        return
    print_table(
        ("name", "version", "state", "jobs", "suggestions", "adopted", "declined", "strikes", "about"),
        [*(_row(one) for one in modules), *_not_running(BUILT_IN, modules)],
    )


@app.command()
def enable(
    module: ModuleArgument,
    job: JobsOption,
    version: VersionOption = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running module serve a job (again).

    Example: dmsc policy enable stage-rebalancing --job j3f2a1c
    """
    _show(_order(gateway, token, state, module, "enable", version, job), json)


@app.command()
def disable(
    module: ModuleArgument,
    job: JobsOption,
    version: VersionOption = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running module leave a job alone; what it has had adopted for it ends.

    Example: dmsc policy disable stage-rebalancing --job j3f2a1c
    """
    _show(_order(gateway, token, state, module, "disable", version, job), json)


@app.command()
def order(
    module: ModuleArgument,
    op: Annotated[str, typer.Argument(metavar="activate|shadow|drain", show_default=False)],
    version: VersionOption = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is logged.")] = "",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running module be adopted from, only watch, or leave. Training does not notice.

    Example: dmsc policy order my-idea shadow --reason 'looks odd'
    """
    if op not in ("activate", "shadow", "drain"):
        from schemas.errors import BadInput

        raise BadInput(f"{op}: activate, shadow or drain")
    _show(_order(gateway, token, state, module, op, version, [], reason), json)


@app.command()
def ask(
    module: ModuleArgument,
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id.", show_default=False)],
    version: VersionOption = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE.json",
            help="Observations to give it first: a list, as in POST /v1/observations.",
        ),
    ] = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Ask a running module what it would do for a job now. Nothing of it is adopted.

    Example: dmsc policy ask service-time-weights j3f2a1c
    """
    given = _observations(inputs) if inputs is not None else ()
    answer = ask_gateway(
        gateway, token, state, lambda client: client.ask_policy(module, job, version=version, inputs=given)
    )
    if json:
        print_json(answer)
    elif not answer.suggestions:
        print_text(f"{answer.module} {answer.version}: no suggestion: {answer.reason}")
    else:
        rows = [
            (one.scope, one.action.action, f"{one.confidence:.2f}", f"{one.valid_s:g} s", one.reason)
            for one in answer.suggestions
        ]
        print_table(("scope", "action", "confidence", "valid", "reason"), rows)


def _order(
    gateway: str | None,
    token: str | None,
    state: Path | None,
    module: str,
    op: str,
    version: str | None,
    jobs: list[str],
    reason: str = "",
) -> ModuleLifecycle:
    def ask(client: AsyncClient) -> Awaitable[ModuleLifecycle]:
        return client.order_policy(module, op, version=version, jobs=jobs, reason=reason)

    return ask_gateway(gateway, token, state, ask)


def _observations(path: Path) -> tuple[Observation, ...]:
    from pydantic import TypeAdapter, ValidationError

    from schemas.errors import BadInput
    from schemas.observation import Observation

    try:
        return TypeAdapter(tuple[Observation, ...]).validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{path}: {place}: {first['msg']}" if place else f"{path}: {first['msg']}") from None


def _show(lifecycle: ModuleLifecycle, json: bool) -> None:
    if json:
        print_json(lifecycle)
        return
    print(f"{lifecycle.module} {lifecycle.version}: {lifecycle.state}, {_jobs(lifecycle)}")


def _state(one: ModuleStatus) -> str:
    return one.state.value if one.alive else "gone"


def _row(one: ModuleStatus) -> tuple[str, ...]:
    counts = (one.suggestions, one.adopted, one.declined, one.strikes)
    about = f"for another {one.suspended_s:.0f} s: {one.reason}" if one.suspended_s else one.reason
    return (one.module, one.version, _state(one), _jobs(one), *map(str, counts), about)


def _not_running(built_in: Iterable[str], modules: list[ModuleStatus]) -> list[tuple[str, ...]]:
    running = {one.module for one in modules}
    return [
        (name, "", "not running", "", "", "", "", "", "built in") for name in built_in if name not in running
    ]


def _jobs(one: ModuleStatus | ModuleLifecycle) -> str:
    """For which jobs it is enabled."""
    without = f" but {', '.join(one.without)}" if one.without else ""
    return f"{', '.join(one.jobs) or 'all jobs'}{without}"


def write_policy(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes `folder/name.py` and `folder/test_name.py` (with _ for -); returns their paths.

    Raises:
        BadInput: the name can't be one, or one of the files is there.
    """
    module = name.replace("-", "_").lower()
    if not is_token(name) or not module[0].isalpha() or keyword.iskeyword(module):
        raise BadInput(f"{name}: a policy's name has letters, digits, - and _, and begins with a letter")
    file, test_file = folder / f"{module}.py", folder / f"test_{module}.py"
    for path in (file, test_file):
        if path.exists():
            raise BadInput(f"{path}: is there already; choose another name or folder")
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(word.capitalize() for word in module.split("_") if word) or module,
        "file": file.name,
        "test_file": test_file.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in ((file, "policy.py.template"), (test_file, "test_policy.py.template")):
        text = resources.files("dmsc").joinpath("templates", template).read_text(encoding="utf-8")
        path.write_text(text.format(**words), encoding="utf-8")
    return file, test_file
