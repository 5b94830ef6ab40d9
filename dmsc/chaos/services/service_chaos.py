"""Executes a chaos run of a service: undisturbed answers, the same with faults, and the report."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

from dmsc.chaos.holding import Holding
from dmsc.chaos.injection import fault_line
from dmsc.chaos.patience import persistently
from dmsc.chaos.plan import FaultKind, plan
from dmsc.chaos.processes import ProcessHandle, resume
from dmsc.chaos.report import InjectedFault
from dmsc.chaos.run import Chaos, ChaosOptions, Tell, auditing
from dmsc.chaos.services.load import LoadAnswer, LoadRequest, requests_of
from dmsc.chaos.services.service_report import ServiceChaosReport
from dmsc.client.async_client import AsyncClient
from dmsc.state.settings import find_gateway
from schemas.errors import BadInput, DmscError
from schemas.job import JobSpec
from schemas.services.completion import Completion
from schemas.services.model_service import ServedVersion

USELESS = frozenset({FaultKind.DATA, FaultKind.DISK_FULL, FaultKind.NO_ROOM})
"""Faults that a service has nothing to show for: it has no data, and keeps nothing on a disk."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much is asked: by `clients` at a time, each with a request of its own for `tokens` tokens."""

    clients: int = 8
    tokens: int = 64
    pause_s: float = (
        0.1  # of a client that was told an error, before it asks again; doubled with each further one
    )
    longest_pause_s: float = 2.0


def check_options(options: ChaosOptions) -> None:
    """Raise `BadInput` for what can't be done to a service."""
    if options.every.seconds is None:
        raise BadInput(f"--every {options.every}: a service has no steps; give a time, as 10s")
    if options.faults is None:
        raise BadInput("a service has no end; say how many faults with --faults")
    useless = [kind.value for kind in options.kinds if kind in USELESS]
    if useless:
        raise BadInput(f"--what {useless[0]}: hits nothing of a service; leave it out")


class ServiceChaos:
    """Runs a service of one mesh on this machine with and without faults. `chaos`: opened for that mesh."""

    def __init__(self, chaos: Chaos, load: LoadOptions = LoadOptions()) -> None:
        self._chaos = chaos
        self._load = load

    async def run(self, service: JobSpec | str, options: ChaosOptions) -> ServiceChaosReport:
        """Ask a version of a service all the time while faults are injected, until all of them were.

        Args:
            service: SERVICE or SERVICE@VERSION, or a file of a version, which is deployed and stopped again.
            options: The faults; their number and an interval in seconds are needed.

        Raises:
            BadInput: The version does not answer with tokens, or has instances on other machines; or the
                options are for jobs.
        """
        check_options(options)
        async with AsyncExitStack() as stack:
            if isinstance(service, JobSpec):
                name, wanted = await self._deployed(service, stack)
            else:
                name, _, wanted = service.partition("@")
            found = await self._ready(name, wanted or None)
            address = find_gateway(state=self._chaos.folder)
            clients = []
            for number in range(self._load.clients):
                turn = number % len(address.urls)  # each gateway writes some of the answers
                urls = (*address.urls[turn:], *address.urls[:turn])
                client = AsyncClient(urls, token=address.token, patience_s=self._chaos.times.patience_s)
                clients.append(await stack.enter_async_context(client))
            return await self._both(found, name, clients, options)

    async def _deployed(self, spec: JobSpec, stack: AsyncExitStack) -> tuple[str, str]:
        if spec.serve is None:
            raise BadInput("the file has no `serve`")
        name, version = spec.serve.service, spec.serve.version
        await self._chaos.client.deploy(spec)

        async def stop() -> None:
            try:
                await persistently(lambda: self._chaos.client.stop_service(name, version))
            except DmscError as error:
                self._chaos.say(
                    f"{name}@{version} still runs: dmsc service stop {name} {version} ({error.text})"
                )

        stack.push_async_callback(stop)
        return name, version

    async def _ready(self, name: str, wanted: str | None) -> ServedVersion:
        """The version, once it is deployed.

        Raises:
            BadInput: It does not answer with tokens.
            NotFound, LastingConflict: See `wait_for_version`.
        """
        last = ""

        def show(version: ServedVersion) -> None:
            nonlocal last
            if version.state != last:
                self._chaos.say(f"{name}@{version.version} is {version.state}")
                last = version.state

        version = await self._chaos.client.wait_for_version(
            name, wanted, poll_s=self._chaos.times.look_every_s, progress=show
        )
        if version.kind == "predict":
            raise BadInput(
                f"{name} answers with tensors; chaos compares the tokens of services that generate"
            )
        return version

    # --- the two runs -------------------------------------------------------------------------------------
    async def _both(
        self, version: ServedVersion, name: str, clients: list[AsyncClient], options: ChaosOptions
    ) -> ServiceChaosReport:
        model, count = f"{name}@{version.version}", len(clients)
        requests = requests_of(count, self._load.tokens, version.context, options.seed)
        self._chaos.say(f"{model}: {count} answers without faults, to compare with")
        references = await asyncio.gather(
            *(ask(client, model, request) for client, request in zip(clients, requests, strict=True))
        )
        for reference in references:
            if reference.error:
                raise BadInput(f"{model} does not answer: {reference.error}")
        await self._chaos.injector.all_here(version.job)  # an idle version has instances from here on
        kinds = ", ".join(kind.value for kind in options.kinds)
        self._chaos.say(f"{model}: a fault every {options.every} ({kinds}), seed {options.seed}")
        answers: list[LoadAnswer] = []
        over = asyncio.Event()
        async with asyncio.TaskGroup() as asking:
            for client, request in zip(clients, requests, strict=True):
                asking.create_task(_ask_again_and_again(client, model, request, answers, over, self._load))
            try:
                faults = await self._faults(version.job, options, answers)
            finally:
                over.set()
        return ServiceChaosReport(
            service=name,
            version=version.version,
            job=version.job,
            exact=bool(version.exact),
            inexact_because=version.inexact_because,
            seed=options.seed,
            every=str(options.every),
            clients=count,
            faults=tuple(faults),
            references=tuple(references),
            answers=tuple(answers),
        )

    async def _faults(
        self, job: str, options: ChaosOptions, answers: list[LoadAnswer]
    ) -> list[InjectedFault]:
        """Injects the plan's faults; returns an interval after the last one, so that its cost is seen."""
        chaos, faults = self._chaos, list[InjectedFault]()
        frozen: list[ProcessHandle] = []
        async with AsyncExitStack() as stack:
            stack.callback(resume, frozen)
            holding = await stack.enter_async_context(Holding(chaos.client, frozen, chaos.say))
            tell: Tell = await stack.enter_async_context(auditing(chaos.client, chaos.say, chaos.times))
            began, every_s = time.monotonic(), options.every.seconds or 0.0
            for planned in plan(options.seed, options.every, options.kinds):
                if planned.number >= (options.faults or 0):
                    break
                due = began + planned.due + planned.offset * every_s / 2
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                fault = await chaos.injector.inject(planned, job, lambda: True, frozen, holding)
                faults.append(fault)
                chaos.say(fault_line(fault, f"answer {len(answers)}", chaos.times.hold_s))
                if fault.fired:
                    tell(fault)
            await asyncio.sleep(every_s)
        return faults


async def _ask_again_and_again(
    client: AsyncClient,
    model: str,
    request: LoadRequest,
    answers: list[LoadAnswer],
    over: asyncio.Event,
    load: LoadOptions,
) -> None:
    """Asks until `over`; after an error the next request waits a little, so that it is no second fault."""
    pause_s = load.pause_s
    while not over.is_set():
        answer = await ask(client, model, request)
        answers.append(answer)
        if not answer.error:
            pause_s = load.pause_s
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await over.wait()
        pause_s = min(2 * pause_s, load.longest_pause_s)


async def ask(client: AsyncClient, model: str, request: LoadRequest) -> LoadAnswer:
    """Ask once. An error that the client is told is in the answer; it is not raised."""
    began = time.time()
    pieces: list[Completion] = []
    arrivals: list[float] = []
    error = ""
    try:
        asked = client.ask(
            model,
            request.prompt,
            tokens=request.tokens,
            temperature=request.temperature,
            seed=request.seed,
            digests=request.digests,
        )
        async with aclosing(asked):
            async for piece in asked:
                pieces.append(piece)
                arrivals.append(time.time())
    except DmscError as found:
        error = f"{found.code}: {found.text}"
    choices = [piece.choices[0] for piece in pieces]
    return LoadAnswer(
        request=request.number,
        began=began,
        ended=time.time(),
        arrivals=tuple(arrivals),
        text="".join(choice.text for choice in choices),
        finish=(choices[-1].finish_reason or "") if choices else "",
        digests=tuple(digest for piece in pieces for digest in piece.dmsc.digests or ()),
        error=error,
    )
