"""The synchronous client of a mesh's HTTP API: submits jobs, follows them, fetches weights.

    from dmsc import Client
    with Client() as client:                       # the mesh of ./.dmsc, or $DMSC_GATEWAY and $DMSC_TOKEN
        job = client.submit("examples/stdlib-gpt.yaml")
        print(client.wait(job.job).loss_last)
        client.train(model=build, data="corpus.txt", steps=100).curve()

It raises the same errors as `dmsc.AsyncClient`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from dmsc.client.async_client import AsyncClient
from dmsc.client.loop_thread import LoopThread
from dmsc.client.submitted_job import Job
from schemas.job import JobRecord

P = ParamSpec("P")
T = TypeVar("T")


def _called(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """The method of `Client` that waits for this coroutine of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._runner.call(method(self._client, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """The method of `Client` that iterates over what this method of `AsyncClient` yields."""

    @functools.wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._runner.iterate(method(self._client, *args, **kwargs))

    signature = inspect.signature(method)
    iterator = signature.return_annotation.removeprefix("Async")
    iterate.__signature__ = signature.replace(return_annotation=iterator)  # type: ignore[attr-defined]
    return iterate


class Client:
    """The client for scripts and notebooks: `AsyncClient` without `await`.

    It runs an `AsyncClient` on its own thread, so it also works inside a running event loop (Jupyter). It
    takes the same arguments. Use it with `with`, or call `close()` at the end.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        state: Path | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 30.0,
    ) -> None:
        self._client = AsyncClient(url, token=token, state=state, timeout_s=timeout_s, patience_s=patience_s)
        self._runner = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Closing twice is fine."""
        if self._runner.running:
            self._runner.call(self._client.close())
            self._runner.stop()

    ready = _called(AsyncClient.ready)

    submit = _called(AsyncClient.submit)

    @functools.wraps(AsyncClient.train)
    def train(self, **options: Any) -> Job:
        wait = options.pop("wait", True)
        job = Job(self._runner.call(self._client.train(**options, wait=False)), self._runner.call)
        if wait:
            job.wait(progress=True)
        return job

    each_job = _iterated(AsyncClient.each_job)
    jobs = _called(AsyncClient.jobs)
    job = _called(AsyncClient.job)
    load = _called(AsyncClient.load)
    scale = _called(AsyncClient.scale)
    move = _called(AsyncClient.move)
    recut = _called(AsyncClient.recut)
    cancel = _called(AsyncClient.cancel)
    park = _called(AsyncClient.park)
    resume = _called(AsyncClient.resume)
    prioritise = _called(AsyncClient.prioritise)
    submit_array = _called(AsyncClient.submit_array)
    array = _called(AsyncClient.array)
    cancel_array = _called(AsyncClient.cancel_array)
    park_array = _called(AsyncClient.park_array)
    resume_array = _called(AsyncClient.resume_array)
    prioritise_array = _called(AsyncClient.prioritise_array)
    wait_array = _called(AsyncClient.wait_array)
    reserve = _called(AsyncClient.reserve)
    reservations = _called(AsyncClient.reservations)
    cancel_reservation = _called(AsyncClient.cancel_reservation)

    deploy = _called(AsyncClient.deploy)
    services = _called(AsyncClient.services)
    service = _called(AsyncClient.service)
    set_traffic = _called(AsyncClient.set_traffic)
    promote_version = _called(AsyncClient.promote_version)
    roll_back_service = _called(AsyncClient.roll_back_service)
    shadow_version = _called(AsyncClient.shadow_version)
    scale_version = _called(AsyncClient.scale_version)
    stop_service = _called(AsyncClient.stop_service)

    consents = _called(AsyncClient.consents)
    give_consent = _called(AsyncClient.give_consent)
    withdraw_consent = _called(AsyncClient.withdraw_consent)
    send_feedback = _called(AsyncClient.send_feedback)
    kept = _called(AsyncClient.kept)
    collect_kept = _called(AsyncClient.collect_kept)
    erase_kept = _called(AsyncClient.erase_kept)

    mesh = _called(AsyncClient.mesh)
    overview = _called(AsyncClient.overview)
    tap_scope = _called(AsyncClient.tap_scope)
    clusters = _called(AsyncClient.clusters)
    cluster = _called(AsyncClient.cluster)
    each_instance = _iterated(AsyncClient.each_instance)
    instances = _called(AsyncClient.instances)
    instance = _called(AsyncClient.instance)
    routes = _called(AsyncClient.routes)
    plan = _called(AsyncClient.plan)
    queue = _called(AsyncClient.queue)
    nodes = _called(AsyncClient.nodes)
    node = _called(AsyncClient.node)
    cordon = _called(AsyncClient.cordon)
    uncordon = _called(AsyncClient.uncordon)
    drain = _called(AsyncClient.drain)
    machines = _called(AsyncClient.machines)
    order_machines = _called(AsyncClient.order_machines)
    release_machine = _called(AsyncClient.release_machine)
    reset_pool = _called(AsyncClient.reset_pool)
    leave = _called(AsyncClient.leave)

    each_fault = _iterated(AsyncClient.each_fault)
    faults = _called(AsyncClient.faults)
    fault = _called(AsyncClient.fault)
    follow_faults = _iterated(AsyncClient.follow_faults)
    strike = _called(AsyncClient.strike)
    tell_outside_fault = _called(AsyncClient.tell_outside_fault)

    promote_policy = _called(AsyncClient.promote_policy)
    roll_back_policy = _called(AsyncClient.roll_back_policy)
    policies = _called(AsyncClient.policies)
    order_policy = _called(AsyncClient.order_policy)
    ask_policy = _called(AsyncClient.ask_policy)
    automation = _called(AsyncClient.automation)
    learnt_states = _called(AsyncClient.learnt_states)
    replace_learnt_state = _called(AsyncClient.replace_learnt_state)
    observe = _called(AsyncClient.observe)

    events = _iterated(AsyncClient.events)

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobRecord:
        """Wait until the job has ended; return its last record.

        Raises `DeadlineExceeded` after `timeout_s`. A failed job raises nothing: see `state`.
        """
        return self._runner.call(self._client.wait(job), timeout_s=timeout_s)

    curve = _called(AsyncClient.curve)
    prices = _called(AsyncClient.prices)
    accounts = _called(AsyncClient.accounts)

    weights = _called(AsyncClient.weights)
    download_weights = _called(AsyncClient.download_weights)
    each_checkpoint = _iterated(AsyncClient.each_checkpoint)
    checkpoints = _called(AsyncClient.checkpoints)
    download_checkpoint = _called(AsyncClient.download_checkpoint)
    each_dataset = _iterated(AsyncClient.each_dataset)
    datasets = _called(AsyncClient.datasets)
    upload_dataset = _called(AsyncClient.upload_dataset)
    download_dataset = _called(AsyncClient.download_dataset)
    delete_dataset = _called(AsyncClient.delete_dataset)
    create_feed = _called(AsyncClient.create_feed)
    feeds = _called(AsyncClient.feeds)
    feed = _called(AsyncClient.feed)
    push = _called(AsyncClient.push)
    close_feed = _called(AsyncClient.close_feed)
    delete_feed = _called(AsyncClient.delete_feed)
    build = _called(AsyncClient.build)
    builds = _called(AsyncClient.builds)
    build_record = _called(AsyncClient.build_record)
    cancel_build = _called(AsyncClient.cancel_build)
    park_build = _called(AsyncClient.park_build)
    resume_build = _called(AsyncClient.resume_build)
    prioritise_build = _called(AsyncClient.prioritise_build)
    build_events = _iterated(AsyncClient.build_events)
    wait_for_build = _called(AsyncClient.wait_for_build)
    data_sets = _called(AsyncClient.data_sets)
    data_set = _called(AsyncClient.data_set)
    data_set_manifest = _called(AsyncClient.data_set_manifest)
    download_data_set_file = _called(AsyncClient.download_data_set_file)
    check_data_set = _called(AsyncClient.check_data_set)
    delete_data_set = _called(AsyncClient.delete_data_set)
    models = _called(AsyncClient.models)
    model_versions = _called(AsyncClient.model_versions)
    model = _called(AsyncClient.model)
    model_lineage = _called(AsyncClient.model_lineage)
    model_history = _called(AsyncClient.model_history)
    model_keys = _called(AsyncClient.model_keys)
    register_model = _called(AsyncClient.register_model)
    evaluate_model = _called(AsyncClient.evaluate_model)
    approve_model = _called(AsyncClient.approve_model)
    remove_model = _called(AsyncClient.remove_model)
    download_model = _called(AsyncClient.download_model)
    move_alias = _called(AsyncClient.move_alias)
    rule_model = _called(AsyncClient.rule_model)
    codes = _called(AsyncClient.codes)
    upload_code = _called(AsyncClient.upload_code)
    delete_code = _called(AsyncClient.delete_code)

    served_models = _called(AsyncClient.served_models)
    ask = _iterated(AsyncClient.ask)
    complete = _called(AsyncClient.complete)
    predict = _called(AsyncClient.predict)
    embed = _called(AsyncClient.embed)
    aggregate = _called(AsyncClient.aggregate)
    upload_file = _called(AsyncClient.upload_file)
    files = _called(AsyncClient.files)
    download_file = _called(AsyncClient.download_file)
    delete_file = _called(AsyncClient.delete_file)
    create_batch = _called(AsyncClient.create_batch)
    batch = _called(AsyncClient.batch)
    batches = _called(AsyncClient.batches)
    cancel_batch = _called(AsyncClient.cancel_batch)
    wait_for_batch = _called(AsyncClient.wait_for_batch)
    wait_for_version = _called(AsyncClient.wait_for_version)
