"""`dmsc machines`: which machines come and go by themselves, why, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from dmsc.commands.jobs.queue import lasting
from dmsc.console.command_app import CommandApp, ListsByDefault, argument, option
from dmsc.console.option_groups import GatewayQuery

if TYPE_CHECKING:
    from schemas.machines.commands import MachinesStatus, PoolStatus

COLUMNS = ("machine", "pool", "state", "since", "idle", "price/h", "ordered because", "in this state because")
PoolArgument = Annotated[str, argument("POOL", "A pool of the provisioner's file.")]
ReasonOption = Annotated[str, option("--reason TEXT", "Why; shown with the machine.", show_default=False)]

app = CommandApp(
    help="List machines (`dmsc machines` alone does, too), and order or give them back by hand.",
    cls=ListsByDefault,
)


@app.command("list")
def list_(
    all: Annotated[bool, option("--all", "Also the last machines that have ended.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List machines with their states and why they were ordered; then pools, with what they cost today (UTC).

    Example: dmsc machines list
    """
    status = mesh.ask(lambda client: client.machines())
    mesh.show_table(status, COLUMNS, list(_rows(status, ended=all)))
    if not mesh.json:
        for pool in status.pools:
            print(pool_line(pool, time.time()))


def _rows(status: MachinesStatus, *, ended: bool) -> Iterator[tuple[str, ...]]:
    now = time.time()
    for pool in status.pools:
        for machine in (*pool.machines, *(pool.ended if ended else ())):
            yield (
                machine.id,
                pool.pool,
                machine.state,
                lasting(now - machine.since),
                "" if machine.idle_since is None or machine.ended_at else lasting(now - machine.idle_since),
                f"{machine.price:g}" if machine.price else "",
                machine.because,
                machine.reason,
            )


def pool_line(pool: PoolStatus, now: float) -> str:
    """One pool in one line: how many of how many machines, the cost, and what keeps it from more."""
    parts = [f"{pool.pool} ({pool.driver}): {len(pool.machines)} of {pool.most} machines"]
    if pool.least:
        parts.append(f"at least {pool.least}")
    if pool.price:
        budget = "" if pool.budget is None else f" of {pool.budget:g}"
        parts.append(f"{pool.spent:.4g}{budget} spent today")
    if pool.says:
        parts.append(pool.says)
    return ", ".join(parts)


@app.command("dry-run")
def dry_run(mesh: GatewayQuery = GatewayQuery()) -> None:
    """Show what would be ordered and given back now, and for which jobs nothing is, each with its reason.

    The provisioner does just that, but for pools with `dry_run` in its file. What it has ordered already is
    in `dmsc machines list`.

    Example: dmsc machines dry-run
    """
    status = mesh.ask(lambda client: client.machines())
    mesh.show(status, *(status.plan or ("nothing to order, nothing to give back",)), demand_line(status))


def demand_line(status: MachinesStatus) -> str:
    """Who lacks how much, and how old that is."""
    if status.demand_at is None:
        return "the orchestrator has not said yet what is lacking"
    told = f"told {lasting(time.time() - status.demand_at)} ago"
    if not status.jobs:
        return f"no job lacks slots ({told})"
    return f"{status.jobs} job{'s lack' if status.jobs > 1 else ' lacks'} {status.lacking} slots ({told})"


@app.command()
def order(
    pool: PoolArgument,
    count: Annotated[int, option("--count N", "So many machines.", min=1)] = 1,
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Order machines of a pool, whatever the demand; its caps and its budget hold.

    A machine that no job uses is given back after the pool's `idle_s`, as any other.

    Example: dmsc machines order spot --count 2 --reason 'for the course'
    """
    status = mesh.ask(lambda client: client.order_machines(pool, count, reason=reason))
    found = next(each for each in status.pools if each.pool == pool)
    mesh.show(status, pool_line(found, time.time()))


@app.command()
def release(
    machine: Annotated[str, argument("MACHINE", "Its name; see `dmsc machines list`.")],
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Give a machine back, once its instances have moved elsewhere, as `dmsc leave` does.

    They have the pool's `drain_s` for that.

    Example: dmsc machines release dmsc-spot-7 --reason 'its disk is full'
    """
    said = mesh.ask(lambda client: client.release_machine(machine, reason=reason))
    mesh.show({"note": said}, said)


@app.command()
def reset(pool: PoolArgument, mesh: GatewayQuery = GatewayQuery()) -> None:
    """Forget a pool's failures, so that it orders again at once.

    Example: dmsc machines reset spot
    """
    said = mesh.ask(lambda client: client.reset_pool(pool))
    mesh.show({"note": said}, said)
