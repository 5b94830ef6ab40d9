"""`dmsc policy …`: write a policy, run it as functional module, ask it, and change its state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.commands.mesh.run import run_parts
from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    LevelOption,
    ModuleArgument,
    ParentOption,
    StateOption,
    TokenOption,
    TrustOption,
    WaitOption,
)
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from schemas.module_status import ModuleStatus
    from schemas.observation import Observation
    from schemas.policy import ModuleLifecycle
import keyword
from importlib import resources

app = CommandApp(
    help="Write policies, run them in a mesh, ask them, change their state, compare versions.",
    no_args_is_help=True,
)

VersionOption = Annotated[
    str | None, option("--version TEXT", "The version, if several versions of the module run.")
]
JobsOption = Annotated[list[str], option("--job JOB", "The job; repeatable.", show_default=False)]


@app.command()
def run(
    source: Annotated[
        str,
        argument(
            "FILE.py|NAME|default",
            "Your file (FILE.py:Class if it has several policies), the name of a built-in policy, or default:"
            " those that a mesh starts.",
        ),
    ],
    shadow: Annotated[bool, option("--shadow", "Its suggestions are only scored; none is adopted.")] = False,
    job: Annotated[list[str] | None, option("--job JOB", "Serve only this job; repeatable.")] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    log_level: LevelOption = "info",
    wait: WaitOption = 30.0,
    trust_researchers: TrustOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a policy as a functional module of the mesh, until Ctrl-C.

    Its suggestions go to the orchestrator, which adopts or declines each of them and gives a reason; see them
    with `dmsc tap 'policy.>'`. If you run it with your token, it is your module: you may change its state,
    promote it and roll it back.

    Example: dmsc policy run examples/my_policy.py
    """
    import sys

    from dmsc.process.composition import policy_part
    from dmsc.process.policy_loading import DEFAULT, DEFAULT_POLICIES
    from dmsc.state.settings import find_bus
    from dmsc.tapping.role import given_token

    # Thousands of instances send telemetry: the bus's thread must run often while the policy's computes.
    sys.setswitchinterval(0.001)
    address = find_bus(bus, bus_token, state)
    user_token = None if parent is not None else given_token(token)
    mesh = GatewayOptions(gateway=gateway, token=user_token, state=state)
    owner, role = run_async(_user(mesh)) if user_token else ("", None)
    if parent is not None and not trust_researchers:  # at a shell, users run their own code
        from dmsc.process.sandboxing import confine_module

        confine_module(source, state)
    parts = [
        policy_part(each, shadow=shadow, jobs=job or (), owner=owner, own_jobs=role == "researcher")
        for each in (DEFAULT_POLICIES if source == DEFAULT else (source,))
    ]
    run_parts(parts, address, parent=parent, level=log_level, patience_s=wait)


async def _user(mesh: GatewayOptions, *, patience_s: float = 3.0) -> tuple[str, str | None]:
    """The user whose token it is, and their role.

    If no gateway answers, the name is empty and a warning is logged: the module then belongs to the mesh.
    """
    from bus.logs import get_logger
    from schemas.errors import Unavailable

    try:
        async with mesh.client(timeout_s=patience_s, patience_s=patience_s) as client:
            about = await client.whoami()
            return about.user, about.role
    except Unavailable as error:
        get_logger("policy").warning(
            "whose module this is can't be asked; it is the mesh's", reason=error.text
        )
        return "", None


@app.command()
def new(
    name: Annotated[str, argument("NAME", "The policy's name.")],
    folder: Annotated[Path, option("--folder DIR", "The folder to write to.", show_default="here")] = Path(),
) -> None:
    """Write a working example policy and its test, as a start for your own.

    Example: dmsc policy new my-idea
    """

    file, test_file = write_policy(name, folder)
    print(f"{file}       dmsc policy run --shadow {file}")
    print(f"{test_file}  pytest {test_file}")


@app.command("list")
def list_(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List running functional modules with their counts, and built-in policies that do not run.

    Strikes count invalid suggestions, floods of suggestions, outdated suggestions, and crashes.

    Example: dmsc policy list --json
    """
    from dmsc.process.policy_loading import BUILT_IN

    modules = mesh.ask(lambda client: client.policies())
    running = {module.module for module in modules}
    others = [name for name in BUILT_IN if name not in running]
    documents = [
        {"name": module.module, **module.model_dump(mode="json"), "state": _state(module)}
        for module in modules
    ]
    mesh.show_table(
        [*documents, *({"name": name, "state": "not running"} for name in others)],
        ("name", "version", "state", "jobs", "suggestions", "adopted", "declined", "strikes", "about"),
        [
            *(_row(module) for module in modules),
            *((name, "", "not running", "", "", "", "", "", "built in") for name in others),
        ],
    )


@app.command()
def enable(
    module: ModuleArgument,
    job: JobsOption,
    version: VersionOption = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Let a running module serve a job (again).

    Example: dmsc policy enable stage-rebalancing --job j3f2a1c
    """
    _order(mesh, module, "enable", version, job)


@app.command()
def disable(
    module: ModuleArgument,
    job: JobsOption,
    version: VersionOption = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Stop a running module from serving a job; its adopted suggestions for that job end.

    Example: dmsc policy disable stage-rebalancing --job j3f2a1c
    """
    _order(mesh, module, "disable", version, job)


@app.command()
def order(
    module: ModuleArgument,
    op: Annotated[
        str,
        argument(
            "activate|shadow|drain",
            "activate: its suggestions may be adopted; shadow: they are only scored; drain: it ends.",
        ),
    ],
    version: VersionOption = None,
    reason: Annotated[str, option("--reason TEXT", "Why; it is logged.")] = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Change the state of a running module: active, only watching, or leaving. Training is not affected.

    Example: dmsc policy order my-idea shadow --reason 'looks odd'
    """
    if op not in ("activate", "shadow", "drain"):
        raise bad_input(f"{op}: activate, shadow or drain")
    _order(mesh, module, op, version, [], reason)


@app.command()
def automation(
    job: Annotated[
        str | None, argument("[JOB]", "A job's id; without it the mesh.", show_default=False)
    ] = None,
    mode: Annotated[
        str | None,
        argument(
            "[off|advise|act]",
            "off: nothing is changed by itself; advise: only told; act. Without it the mode is shown.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        option("--objective time|cost|energy|carbon", "Of a job: what is to be small from now on."),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "--budget cost=N,…",
            "Of a job: the most that it may use in all, of time (s), cost (money), energy (J) or carbon (g of"
            " CO2); none lifts a limit, others stay.",
        ),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show or switch how far the mesh, or one job, is changed without a person, and for what.

    The lower one of both modes holds. `act` for a job also releases what persons have set of it.

    Example: dmsc policy automation j3f2a1c advise --objective cost --budget cost=12,energy=none
    """
    from schemas.automation import limits_of
    from schemas.changes import JobObjective

    modes = ("off", "advise", "act")
    if job in modes and mode is None:
        job, mode = None, job
    if mode is not None and mode not in modes:
        raise bad_input(f"{mode}: off, advise or act")
    if objective is not None and objective not in list(JobObjective):
        raise bad_input(f"--objective {objective}: {', '.join(JobObjective)}")
    if job is None and (objective is not None or budget is not None):
        raise bad_input("an objective and a budget are a job's: name one")
    limits = None if budget is None else limits_of(budget)
    status = mesh.ask(lambda client: client.automation(job, mode, objective=objective, budget=limits))
    if status.job is None:
        mesh.show(status, f"mesh: {status.mesh}")
        return
    lower = f", the mesh's is {status.mesh}" if status.mesh is not status.asked else ""
    budget = ", ".join(f"{objective} {most:g}" for objective, most in status.budget.items())
    mesh.show(
        status,
        f"{status.job}: {status.holds} (its own mode is {status.asked}{lower}); objective {status.objective}"
        + (f", budget {budget}" if budget else ""),
    )


@app.command()
def knobs(
    job: Annotated[str, argument("JOB", "A job's id.")],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List who has set which knob of a job (weights, windows, replicas, places, …), to what, and why.

    Example: dmsc policy knobs j3f2a1c
    """
    status = mesh.ask(lambda client: client.automation(job))
    rows = [
        (
            knob.name,
            knob.value,
            knob.holder,
            f"{knob.confidence:.2f}",
            f"{knob.held_s:.0f} s",
            "until released" if knob.left_s is None else f"{knob.left_s:.0f} s",
            knob.reason,
        )
        for knob in status.knobs
    ]
    mesh.show_table(status, ("knob", "value", "holder", "confidence", "held for", "left", "reason"), rows)


@app.command()
def ask(
    module: ModuleArgument,
    job: Annotated[str, argument("JOB", "A job's id.")],
    version: VersionOption = None,
    inputs: Annotated[
        Path | None,
        option(
            "--inputs FILE.json",
            "Observations that the module gets first: a list, as in POST /v1/observations.",
        ),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Ask a running module what it would suggest for a job now. The answer is not adopted.

    Example: dmsc policy ask service-time-weights j3f2a1c
    """
    observations = _observations(inputs) if inputs is not None else ()
    answer = mesh.ask(lambda client: client.ask_policy(module, job, version=version, inputs=observations))
    if not answer.suggestions:
        mesh.show(answer, f"{answer.module} {answer.version}: no suggestion: {answer.reason}")
        return
    rows = [
        (
            suggestion.scope,
            suggestion.action.action,
            f"{suggestion.confidence:.2f}",
            f"{suggestion.valid_s:g} s",
            suggestion.reason,
        )
        for suggestion in answer.suggestions
    ]
    mesh.show_table(answer, ("scope", "action", "confidence", "valid", "reason"), rows)


def _order(
    mesh: GatewayQuery, module: str, op: str, version: str | None, jobs: list[str], reason: str = ""
) -> None:
    lifecycle = mesh.ask(
        lambda client: client.order_policy(module, op, version=version, jobs=jobs, reason=reason)
    )
    mesh.show(lifecycle, f"{lifecycle.module} {lifecycle.version}: {lifecycle.state}, {_jobs(lifecycle)}")


def _observations(path: Path) -> tuple[Observation, ...]:
    from pydantic import TypeAdapter, ValidationError

    from schemas.observation import Observation

    try:
        return TypeAdapter(tuple[Observation, ...]).validate_json(path.read_bytes())
    except OSError as error:
        raise bad_input(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise bad_input(f"{path}: {place}: {first['msg']}" if place else f"{path}: {first['msg']}") from None


def _state(status: ModuleStatus) -> str:
    return status.state.value if status.alive else "gone"


def _row(status: ModuleStatus) -> tuple[str, ...]:
    counts = (status.suggestions, status.adopted, status.declined, status.strikes)
    about = (
        f"for another {status.suspended_s:.0f} s: {status.reason}" if status.suspended_s else status.reason
    )
    return (status.module, status.version, _state(status), _jobs(status), *map(str, counts), about)


def _jobs(status: ModuleStatus | ModuleLifecycle) -> str:
    """The jobs for which a module is enabled."""
    without = f" but {', '.join(status.without)}" if status.without else ""
    return f"{', '.join(status.jobs) or 'all jobs'}{without}"


def write_policy(name: str, folder: Path) -> tuple[Path, Path]:
    """Write `folder/name.py` and `folder/test_name.py` (with _ for -), and return their paths.

    Raises:
        BadInput: The name is not allowed, or one of the files exists.
    """
    from schemas.base import is_token

    module = name.replace("-", "_").lower()
    if not is_token(name) or not module[0].isalpha() or keyword.iskeyword(module):
        raise bad_input(f"{name}: a policy's name has letters, digits, - and _, and begins with a letter")
    file, test_file = folder / f"{module}.py", folder / f"test_{module}.py"
    for path in (file, test_file):
        if path.exists():
            raise bad_input(f"{path}: is there already; choose another name or folder")
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
