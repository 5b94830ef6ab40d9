"""`dmsc service kept|learn`, `dmsc data erase`: what a service has kept, learns from, and has to forget."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.commands.services.consents import ServiceArgument
from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.backflow.learning import Learned, LearnOptions
    from dmsc.client.async_client import AsyncClient
    from schemas.job import JobSpec
    from schemas.services.keeping import KeptErased


def kept(service: ServiceArgument, mesh: GatewayQuery = GatewayQuery()) -> None:
    """Show how many requests a service has kept, of how many users, and the files made of them.

    Example: dmsc service kept chat
    """
    from dmsc.commands.security.user import when

    found = mesh.ask(lambda client: client.kept(service))
    taken = ", ".join(f"{count:,} {kind}" for kind, count in found.redacted.items()) or "nothing"
    rows = [
        (
            str(each.number),
            f"{each.items:,}",
            f"{each.users:,}",
            each.source,
            each.sha256[:12],
            when(each.made_at),
            when(each.until),
        )
        for each in found.collections
    ]
    if not mesh.json:
        ends = f"; the first ends {when(found.first_ends)}" if found.first_ends else ""
        print_text(
            f"{found.items:,} requests of {found.users:,} users ({found.subjects:,} subjects), "
            f"{found.with_feedback:,} with feedback{ends}; taken out: {taken}"
        )
    columns = ("collection", "requests", "users", "source", "digest", "made", "ends")
    mesh.show_table(found, columns, rows)


def learn(
    service: ServiceArgument,
    file: Annotated[Path, argument("FILE.yaml", "A job file; its data, weights and name are filled in.")],
    set_: Annotated[
        list[str] | None, option("--set KEY=VALUE", "Override a key of the job file; repeatable.")
    ] = None,
    model: Annotated[str | None, option("--model NAME", "Its name in the registry (the service's).")] = None,
    collection: Annotated[
        int | None, option("--collection N", "Go on with the round of this file (makes a new one).", min=1)
    ] = None,
    min_rating: Annotated[
        float | None, option("--min-rating R", "Only requests rated at least so, -1 to 1.", min=-1, max=1)
    ] = None,
    share: Annotated[
        float | None, option("--share S", "Largest part of one user (the service's).", min=0, max=1)
    ] = None,
    worse: Annotated[
        float, option("--worse L", "By how much a loss may be higher than before; -0.1: it has to be lower.")
    ] = 0.0,
    canary: Annotated[
        float,
        option(
            "--canary PERCENT", "Deploy it, with so much of the traffic (0: only say how).", min=0, max=50
        ),
    ] = 0.0,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Train on what a service has kept, and make what is no worse than what it serves a candidate.

    Nobody's requests are more than a share of what is trained on. The weights become a version in the
    registry with the losses before and after; one that passes gets the alias `candidate`, and with --canary
    is deployed beside the others. A round that broke off, wants an approval, or has no canary yet goes on
    with --collection: nothing is trained twice. The exit code is 1 if it does not pass.

    Example: dmsc service learn chat learn.yaml --canary 5
    """
    from dmsc.backflow.learning import LearnOptions
    from dmsc.client.job_file import load_job
    from dmsc.console.exit_codes import ExitCode

    spec = load_job(file, set_ or ())
    if spec.serve is not None or spec.array is not None:
        raise bad_input(f"{file}: give a file that trains one job, without `serve` and `array`")
    options = LearnOptions(
        model=model or service,
        collection=collection,
        min_rating=min_rating,
        share=share,
        worse=worse,
        canary=round(canary * 100),
    )
    learned = run_async(_learn(service, spec, options, mesh))
    document = asdict(learned) | {"collection": learned.collection.model_dump(mode="json")}
    mesh.show(document, *([learned.advice] if learned.advice else []))
    leave(ExitCode.OK if learned.verdict.passed else ExitCode.FAILED)


async def _learn(service: str, spec: JobSpec, options: LearnOptions, mesh: GatewayQuery) -> Learned:
    from dmsc.backflow.learning import learn

    async with mesh.client() as client:
        return await learn(client, service, spec, options, lambda text: print(text, file=sys.stderr))


def erase(
    user: Annotated[str, argument("USER", "Whose requests, as `dmsc user list` shows the user.")],
    subject: Annotated[
        str | None, option("--subject ID", "Only those that named this `user`, whom USER serves.")
    ] = None,
    service: Annotated[
        str | None, option("--service NAME", "Only what this service has kept (all yours).")
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Erase what services have kept of a user or subject, and say what was trained on it.

    For owners of services and operators; users themselves take it back with `dmsc consent withdraw`. Files
    for training that hold some of it go as a whole; the next ones are made without it.

    Example: dmsc data erase ann --subject customer-17
    """

    async def act(client: AsyncClient) -> list[KeptErased]:
        from schemas.errors import Refused

        if service is not None:
            return [await client.erase_kept(service, user, subject=subject)]
        erased: list[KeptErased] = []
        refusals: dict[str, Refused] = {}
        for each in await client.services():
            try:
                erased.append(await client.erase_kept(each.service, user, subject=subject))
            except Refused as error:  # another's service, which its owner or an operator asks
                refusals[each.service] = error
        if refusals and not erased:
            last = next(reversed(refusals.values()))
            raise Refused(f"nothing was erased, for no service is yours: {last.text}", **last.fields)
        if refusals:
            print(f"not erased of services that are others': {', '.join(refusals)}", file=sys.stderr)
        return erased

    found = mesh.ask(act)
    rows = [
        (
            each.service,
            f"{each.items:,}",
            " ".join(map(str, each.collections)),
            " ".join(each.jobs),
            " ".join(each.models),
            " ".join(each.versions),
        )
        for each in found
    ]
    columns = ("service", "erased", "collections", "jobs that read them", "models", "served as")
    mesh.show_table({"erased": found}, columns, rows)
