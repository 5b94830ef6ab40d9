"""A run as an operator sees it: every metric of the field told by a live mesh, every alert provoked in it.

Loss, gradients and slowness are provoked in the model itself. A device's figures are samples that the test
sends in an instance's name, with what a card would tell, for there is none here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bus import subjects
from bus.connection import Bus
from dmsc.state.state_folder import StateFolder
from schemas.alert import Alert, AlertKind
from schemas.cluster import Slot
from schemas.envelope import EntityKind
from schemas.job import JobEvent
from schemas.registry import ServiceRecord
from schemas.telemetry import DeviceDetail, DeviceSample, InstanceSample
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.patience import PATIENCE_S
from tests.waiting import beside, eventually

HOT_C = 92.0

FIELD = {
    "tokens/s": ("dmsc_job_tokens_per_second", "dmsc_instance_tokens_per_second"),
    "MFU": ("dmsc_job_mfu_ratio", "dmsc_job_model_flops_per_second"),
    "GPU utilisation": (
        "dmsc_device_utilization_ratio",
        "dmsc_device_throttled",
        "dmsc_device_clock_hertz",
    ),
    "memory": (
        "dmsc_device_memory_used_bytes",
        "dmsc_instance_resident_bytes",
        "dmsc_node_memory_used_bytes",
    ),
    "power": ("dmsc_device_power_watts", "dmsc_device_power_limit_watts"),
    "energy": ("dmsc_device_energy_joules_total", "dmsc_job_energy_joules_total"),
    "cost per token": ("dmsc_job_energy_cost_total", "dmsc_job_tokens_total"),
    "loss-convergence speed": ("dmsc_job_loss", "dmsc_job_loss_decrease_per_million_tokens"),
    "all-reduce time": ("dmsc_instance_allreduce_seconds",),
    "bubble": ("dmsc_stage_bubble_ratio",),
    "gradient norm": ("dmsc_job_gradient_norm",),
    "queue": ("dmsc_instance_queue_microbatches", "dmsc_instance_in_flight_microbatches"),
    "link throughput": (
        "dmsc_instance_sent_bytes_total",
        "dmsc_instance_received_bytes_total",
        "dmsc_link_latency_seconds",
        "dmsc_device_nvlink_sent_bytes_total",
        "dmsc_device_pcie_sent_bytes_total",
    ),
    "data": ("dmsc_instance_data_stall_seconds_total",),
    "recoveries": ("dmsc_job_recoveries_total",),
    "route changes": ("dmsc_route_changes_total",),
    "bus latency": ("dmsc_bus_round_trip_seconds",),
    "device health": (
        "dmsc_device_temperature_celsius",
        "dmsc_device_ecc_errors_total",
        "dmsc_device_xid_errors_total",
        "dmsc_device_ecc_corrected_errors_total",
    ),
    "alerts": ("dmsc_job_alert", "dmsc_job_alerts_total"),
}
"""What an operator asks for, and the metrics that tell it."""

DETAIL = DeviceDetail(
    clock_mhz=1_200,
    memory_clock_mhz=2_600,
    throttle=("thermal hardware",),
    power_limit_w=700.0,
    ecc_corrected=0,
    pcie_sent_bytes=1,
    pcie_received_bytes=1,
    nvlink_sent_bytes=1,
    nvlink_received_bytes=1,
)

Labels = dict[str, str]
Table = dict[str, list[tuple[Labels, float]]]


class Watched:
    """A running job: its alerts as they come, its instances, what its processes tell Prometheus."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self.mesh, self.job = mesh, job
        self.alerts: list[Alert] = []
        self.steps = 0
        self.news = asyncio.Event()
        self.lacking = ""
        """What the last look at the metrics did not find."""

    async def follow(self, bus: Bus) -> None:
        """By the stream of the bus itself."""
        async with contextlib.aclosing(bus.history(subjects.JOB_EVENT, follow=True, job=self.job)) as events:
            async for recorded in events:
                event = recorded.message
                assert isinstance(event, JobEvent)
                if event.alert is not None:
                    self.alerts.append(event.alert)
                if event.result is not None:
                    self.steps = event.result.step + 1
                self.news.set()

    async def until(self, what: Callable[[], Any]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := what()):
                self.news.clear()
                await self.news.wait()
        return found

    async def alert(self, kind: AlertKind, subject: str = "") -> Alert:
        def raised() -> Alert | None:
            return next(
                (one for one in self.alerts if one.raised and (one.kind, one.subject) == (kind, subject)),
                None,
            )

        found: Alert = await self.until(raised)
        return found

    async def instances(self) -> list[ServiceRecord]:
        status = await asyncio.to_thread(self.mesh.client.mesh)
        return sorted(
            (
                one
                for one in status.services
                if one.job == self.job and one.stage is not None and one.stage >= 0
            ),
            key=lambda one: one.sid,
        )

    def urls(self) -> list[str]:
        """Of every process."""
        file = StateFolder(self.mesh.state).mesh()
        assert file is not None
        return list(file.metrics.values())

    async def scraped(self) -> Table:
        found: Table = {}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            for url in self.urls():
                for family in text_string_to_metric_families((await client.get(url)).text):
                    for sample in family.samples:
                        found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found


@asynccontextmanager
async def watched(mesh: Mesh, folder: Path) -> AsyncIterator[Watched]:
    """A job that runs until the end of the block."""
    job = tiny_job(
        model={"factory": "disturbed:disturbed", "args": {"folder": str(folder)}},
        data={"source": __file__},
        parallel={"stages": 2, "replicas": 2},
        training={"steps": 100_000},
        routing={"algorithm": "round-robin"},  # a slow instance goes on getting work
    )
    record = await asyncio.to_thread(mesh.client.submit, job)
    found = Watched(mesh, record.job)
    async with mesh.bus("operator", token=mesh.token) as bus, beside(found.follow(bus)):
        try:
            await found.until(lambda: found.steps >= 25)  # alerts have learnt what is usual
            yield found
        finally:
            await asyncio.to_thread(mesh.client.cancel, record.job)


@asynccontextmanager
async def telling_of_a_device(mesh: Mesh, record: ServiceRecord) -> AsyncIterator[None]:
    """Samples in the name of an instance, as often as needed: a card that is used, hot, and throttled."""

    async def tell(bus: Bus) -> None:
        for number in itertools.count(1):
            device = DeviceSample(
                device="cuda:0",
                utilization=0.9,
                memory_used_bytes=10 << 30,
                memory_total_bytes=80 << 30,
                temperature_c=HOT_C,
                power_w=300.0,
                energy_j=1_000.0 * number,
                ecc_errors=0,
                xid_errors=(),
                detail=DETAIL,
            )
            sample = InstanceSample(
                job=record.job,
                sid=record.sid,
                incarnation=record.incarnation,
                stage=record.stage,
                step=1,
                cluster=record.endpoint.cluster,
                node=record.endpoint.node,
                device=device,
                microbatches=1,
                service_ms=1.0,
                reduce_ms=1.0,
                busy=0.5,
            )
            await bus.publish(subjects.INSTANCE_SAMPLE, sample, job=record.job, sid=record.sid)
            await asyncio.sleep(0.1)

    async with mesh.bus(record.sid, EntityKind.INSTANCE) as bus, beside(tell(bus)):
        yield


@contextlib.contextmanager
def knob(file: Path) -> Any:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


async def test_what_an_operator_asks_for_is_told_and_what_goes_wrong_is_alerted(
    mesh: Mesh, tmp_path: Path
) -> None:
    async with watched(mesh, tmp_path) as run:
        *_, hot, slow = await run.instances()
        with knob(tmp_path / "loud"):
            spike = await run.alert(AlertKind.LOSS_SPIKE)
            steep = await run.alert(AlertKind.GRADIENT_NORM)
        assert spike.value is not None
        assert spike.usual is not None
        assert spike.value > 1.2 * spike.usual
        assert steep.text.startswith("gradient norm ")
        async with telling_of_a_device(mesh, hot):
            with knob(tmp_path / f"slow-{slow.endpoint.pid}"):
                warm = await run.alert(AlertKind.TEMPERATURE, hot.endpoint.cluster)
                late = await run.alert(AlertKind.STRAGGLER, slow.sid)
                short = await run.alert(AlertKind.UNDERPERFORMING, slow.sid)
                judged = {slot.busy_with: slot for slot in await slots(mesh)}[slow.sid]
                standing = await asyncio.to_thread(mesh.printed, "status")
                told = await eventually(lambda: everything(run), lambda: run.lacking)
        assert warm.value == HOT_C
        assert late.text
        assert "what the plan expects of its slot" in short.text, "the agent of its node judges (MIC)"
        assert judged.condition == "underperforming"
        assert judged.performance < 0.4
        faults = await asyncio.to_thread(mesh.client.faults, run.job)
        assert {fault.kind for fault in faults} <= {"slow"}, "what is slow is no failure"
        for alert in (warm, late):
            assert alert.text.split()[0] in standing
        assert slow.sid in standing
        record = await asyncio.to_thread(mesh.client.job, run.job)
        assert record.usage.energy_j > 0, "counted by the router, kept in the record"
        assert record.usage.slot_s > 0
        begun = record.correlation
        asked = ("logs", "--correlation", begun, "--last", "5000", "--json")
        said = await asyncio.to_thread(mesh.printed, *asked)
        lines = [json.loads(line) for line in said.splitlines()]
        assert {line["correlation"] for line in lines} == {begun}
        assert len({"orchestrator", "authorizer"} & {line["sid"] for line in lines}) == 2
        kinds = {
            labels["kind"]: value
            for labels, value in told["dmsc_job_alerts_total"]
            if labels["job"] == run.job
        }
        assert set(kinds) == {kind.value for kind in AlertKind}
        throttled = {labels["reason"] for labels, value in told["dmsc_device_throttled"] if value}
        assert throttled == {"thermal hardware"}
        assert all(value > 0 for _, value in told["dmsc_job_mfu_ratio"])
        assert sum(value for _, value in told["dmsc_job_energy_cost_total"]) > 0


async def slots(mesh: Mesh) -> list[Slot]:
    status = await asyncio.to_thread(mesh.client.mesh)
    return [slot for node in status.nodes for slot in node.slots]


async def everything(run: Watched) -> Table | None:
    """All that the field asks for, once it is all there: an instance's own samples come in between.

    Whoever is slow beside others that are slow for a moment, on a busy machine, is no straggler meanwhile.
    """
    found = await run.scraped()
    missing = {name for names in FIELD.values() for name in names} - found.keys()
    down = {"temperature", "straggler"} - (alerts_up(run, found) if "dmsc_job_alert" in found else set())
    run.lacking = f"metrics {sorted(missing)}, alerts {sorted(down)}; told {run.alerts[-6:]}"
    return None if missing or down else found


def alerts_up(run: Watched, told: Table) -> set[str]:
    """Kinds of the job's alerts that stand."""
    return {labels["kind"] for labels, value in told["dmsc_job_alert"] if labels["job"] == run.job and value}
