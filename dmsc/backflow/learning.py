"""A round of learning: file, jobs, gate, candidate, canary. Each step says what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from dmsc.backflow.jobs import (
    GateVerdict,
    judged,
    learning_job,
    losses,
    measuring_job,
    next_version,
    with_canary,
)
from dmsc.client.async_client import AsyncClient
from schemas.errors import BadInput, NotFound
from schemas.job import JobRecord, JobSpec, JobState
from schemas.models.version import ModelVersion
from schemas.services.keeping import KeptCollection

CANDIDATE = "candidate"


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """How a round goes.

    Attributes:
        model: Name in the registry.
        collection: The file of a round that is gone on with; None: a new one is made.
        min_rating: Only requests with at least this rating; None: all.
        share: Largest part of one user; None: the service's.
        worse: By how much a loss may be higher than before; below 0, by how much it has to be lower.
        canary: Ten-thousandths of the traffic that the new version gets; 0: none is deployed, only advised.
        look_s: Between two looks at a version that is being deployed.
    """

    model: str
    collection: int | None = None
    min_rating: float | None = None
    share: float | None = None
    worse: float = 0.0
    canary: int = 0
    look_s: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a round came to.

    `version` is the service's, empty if none was deployed; then `advice` is the command that does.
    """

    collection: KeptCollection
    job: str
    before: str
    verdict: GateVerdict
    reference: str
    version: str = ""
    weights: dict[str, int] | None = None
    advice: str = ""


async def learn(
    client: AsyncClient, service: str, spec: JobSpec, options: LearnOptions, say: Callable[[str], None]
) -> Learned:
    """One round. Raises `BadInput` where nothing can be learnt, and what the requests raise.

    A round of a former collection finds its jobs, its version in the registry and the one that serves.
    """
    serving = await _serving(client, service)
    made = await _collection(client, service, options)
    say(f"collection {made.number}: {made.items:,} requests of {made.users:,} users")
    name = f"{service}-learns-{made.number}"
    learning = learning_job(spec, made, serving, options.model, name=name)
    jobs = [
        await client.submit(each, idempotency_key=each.name) for each in (learning, measuring_job(learning))
    ]
    say(f"job {jobs[0].job} learns, job {jobs[1].job} measures what is served now")
    after, before = await asyncio.gather(*(_done(client, record) for record in jobs))
    registered = (await client.register_model(options.model, job=after.job)).version
    reference = registered.reference
    verdict = judged(losses(before), losses(after), options.worse)
    figures = {f"{each}, after": value for each, value in verdict.after.items()}
    figures |= {f"{each}, before": value for each, value in verdict.before.items()}
    await client.evaluate_model(reference, figures, data=made.source)
    learned = Learned(collection=made, job=after.job, before=before.job, verdict=verdict, reference=reference)
    if not verdict.passed:
        say(f"{reference} does not pass: {verdict.why}")
        return learned
    say(f"{reference} passes: {verdict.why}")
    await _name_candidate(client, registered, verdict.why)
    say(f"{options.model}@{CANDIDATE} is version {registered.version}")
    return await _canary(client, service, serving, learned, options, say)


async def _collection(client: AsyncClient, service: str, options: LearnOptions) -> KeptCollection:
    """The file of this round."""
    if options.collection is None:
        return await client.collect_kept(service, min_rating=options.min_rating, share=options.share)
    for each in (await client.kept(service)).collections:
        if each.number == options.collection:
            return each
    raise BadInput(
        f"service {service} has no collection {options.collection}; "
        f"`dmsc service kept {service}` shows which there are"
    )


async def _serving(client: AsyncClient, service: str) -> JobRecord:
    """The job of the version that a rollback goes back to."""
    found = await client.service(service)
    stable = found.version(found.stable or "")
    if stable is None:
        raise BadInput(
            f"service {service} has no version that serves; `dmsc service show {service}` says why"
        )
    return await client.job(stable.job)


async def _done(client: AsyncClient, record: JobRecord) -> JobRecord:
    ended = await client.wait(record.job)
    if ended.state is not JobState.DONE:
        raise BadInput(f"job {ended.job} ({ended.spec.name}) is {ended.state}: {ended.reason}")
    return ended


async def _name_candidate(client: AsyncClient, version: ModelVersion, why: str) -> None:
    """Has the alias name the version. Raises `Refused` while it lacks approvals."""
    try:
        named = (await client.model(f"{version.name}@{CANDIDATE}")).version
    except NotFound:
        named = None
    if named != version.version:
        await client.move_alias(version.name, CANDIDATE, version.version, reason=why)


async def _canary(
    client: AsyncClient,
    service: str,
    serving: JobRecord,
    learned: Learned,
    options: LearnOptions,
    say: Callable[[str], None],
) -> Learned:
    version = f"learnt-{learned.collection.number}"
    spec = next_version(serving, version, learned.reference)
    if not options.canary:
        number = learned.collection.number
        advice = f"dmsc service learn {service} FILE --model {options.model} --collection {number} --canary 5"
        return replace(learned, advice=advice)
    await client.deploy(spec, idempotency_key=f"{service}-{version}")
    deployed = await client.wait_for_version(service, version, poll_s=options.look_s)
    say(f"{service} {version} is {deployed.state}")
    found = await client.service(service)
    weights = with_canary(found, version, options.canary)
    why = f"canary of {learned.reference}: {learned.verdict.why}"
    await client.set_traffic(service, weights, expected=found.revision, why=why)
    say(f"{version} gets {options.canary / 100:g} % of {service}")
    return replace(learned, version=version, weights=weights)
