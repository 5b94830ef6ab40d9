"""The last samples of a cluster's instances, and sums over all samples, as metrics. Pure.

Taking a sample costs a look-up and a few additions; readings are made on a scrape. Instances that are no
longer present have no readings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import get_args

from entities import metrics as m
from schemas.fault import DeviceErrors
from schemas.task_graph import is_data
from schemas.telemetry import (
    APPLICATION_XIDS,
    DeviceDetail,
    DeviceSample,
    InstanceSample,
    LinkFigures,
    ThrottleReason,
    Tier,
)

JOULES_PER_KWH = 3.6e6
MOST_LINK_SERIES = 3_000
"""Most series of single links from one router; the sums of each instance are always there."""


@dataclass(slots=True)
class _LastSample:
    """The last sample and the sums of one SID.

    The sums continue across incarnations, so that counters never fall; `microbatches`, `stalled_s` and
    `read_bytes` are those of the earlier incarnations.
    """

    sample: InstanceSample
    sent: int = 0
    received: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0
    microbatches: int = 0
    stalled_s: float = 0.0
    read_bytes: Counter[Tier] = field(default_factory=Counter)
    figures: dict[str, LinkFigures] = field(default_factory=dict)

    def take(self, sample: InstanceSample) -> None:
        if sample.incarnation != self.sample.incarnation:
            self.microbatches += self.sample.microbatches
            if self.sample.data is not None:
                self.stalled_s += self.sample.data.stalled_s or 0.0
                self.read_bytes.update(self.sample.data.read_bytes)
            self.figures.clear()
        self.sample = sample
        for link in sample.links:
            self.sent += link.sent_bytes
            self.received += link.received_bytes
            self.transfers += link.transfers
            self.transfer_ms += link.transfer_ms
            self.errors += link.errors
            if link.figures is not None:
                self.figures[link.peer] = link.figures


class InstanceSamples:
    """The samples of one cluster. `price_per_kwh` is the price of energy in any currency, None if unknown."""

    def __init__(self, cluster: str, price_per_kwh: float | None = None) -> None:
        self._cluster = cluster
        self._price_per_kwh = price_per_kwh
        self._instances: dict[str, _LastSample] = {}
        self._energy_j: dict[tuple[str, str], float] = {}  # (node, device) → its last counter
        self._job_energy_j: dict[str, float] = defaultdict(float)

    def take(self, sample: InstanceSample) -> None:
        """Take a sample; samples come in order."""
        instance = self._instances.get(sample.sid)
        if instance is None:
            instance = self._instances[sample.sid] = _LastSample(sample)
        instance.take(sample)
        if sample.device is not None and sample.device.energy_j is not None:
            self._spend(sample.node, sample.device.device, sample.device.energy_j)

    def _spend(self, node: str, device: str, counter_j: float) -> None:
        """Charge the energy that a device used since its last sample to the jobs on it, in equal parts."""
        before_j = self._energy_j.get((node, device), counter_j)
        self._energy_j[node, device] = counter_j
        if counter_j <= before_j:  # the first sample, or a restarted driver
            return
        jobs = {
            instance.sample.job
            for instance in self._instances.values()
            if instance.sample.node == node
            and instance.sample.device is not None
            and instance.sample.device.device == device
        }
        for job in jobs:
            self._job_energy_j[job] += (counter_j - before_j) / len(jobs)

    def energy_j(self, job: str) -> float | None:
        """What the job's devices have used since it was first seen here; None if none measures that."""
        return self._job_energy_j.get(job)

    def forget(self, job: str) -> None:
        """Drop the series of an ended job."""
        self._instances = {
            sid: instance for sid, instance in self._instances.items() if instance.sample.job != job
        }
        self._job_energy_j.pop(job, None)

    def readings(self, present: Collection[str]) -> Iterator[m.MetricReading]:
        """The readings of the instances `present` (SIDs); all others are forgotten."""
        for sid in self._instances.keys() - set(present):
            del self._instances[sid]
        busy: dict[tuple[str, str], list[float]] = defaultdict(list)
        links = 0
        for instance in self._instances.values():
            sample = instance.sample
            yield from self._instance(instance)
            if not is_data(sample.stage):
                busy[sample.job, str(sample.stage)].append(sample.busy)
            for peer, figures in instance.figures.items():
                links += 1
                if links <= MOST_LINK_SERIES // 3:
                    yield from self._link(sample, peer, figures)
        for (job, stage), shares in busy.items():
            yield m.BUBBLE(1 - fmean(shares), job=job, stage=stage, cluster=self._cluster)
        yield from self._devices()
        for job, joules in self._job_energy_j.items():
            yield m.JOB_ENERGY(joules, job=job, cluster=self._cluster)
            if self._price_per_kwh is not None:
                cost = joules / JOULES_PER_KWH * self._price_per_kwh
                yield m.JOB_ENERGY_COST(cost, job=job, cluster=self._cluster)

    def _instance(self, instance: _LastSample) -> Iterable[m.MetricReading]:
        sample = instance.sample
        label = {"job": sample.job, "stage": str(sample.stage), "sid": sample.sid, "cluster": self._cluster}
        yield m.IN_FLIGHT(sample.in_flight, **label)
        yield m.MICROBATCHES(instance.microbatches + sample.microbatches, **label)
        yield m.RESIDENT(sample.resident_bytes, **label)
        yield m.SENT(instance.sent, **label)
        yield m.RECEIVED(instance.received, **label)
        yield m.TRANSFERS(instance.transfers, **label)
        yield m.TRANSFER_S(instance.transfer_ms / 1e3, **label)
        yield m.LINK_ERRORS(instance.errors, **label)
        if sample.data is not None:
            if sample.data.stalled_s is not None:
                yield m.DATA_STALL_S(instance.stalled_s + sample.data.stalled_s, **label)
            for tier, count in (instance.read_bytes + Counter(sample.data.read_bytes)).items():
                yield m.DATA_BYTES(count, **label, tier=tier)
        if is_data(sample.stage) and not sample.service_ms:  # a data instance computes nothing
            return
        yield m.QUEUE(sample.queue, **label)
        yield m.BUSY(sample.busy, **label)
        yield m.INSTANCE_TOKENS_PER_S(sample.tokens_per_s, **label)
        yield m.RETAINED(sample.retained_bytes, **label)
        if sample.microbatches:
            yield m.SERVICE_S(sample.service_ms / 1e3, **label)
            yield m.FORWARD_S(sample.forward_ms / 1e3, **label)
            yield m.BACKWARD_S(sample.backward_ms / 1e3, **label)
        if sample.reduce_ms:
            yield m.ALLREDUCE_S(sample.reduce_ms / 1e3, **label)
        if sample.serving is not None:
            yield m.SERVING_SESSIONS(sample.serving.sessions, **label)
            yield m.CACHE_ROWS(sample.serving.rows, **label)
            yield m.CACHE_FREE(sample.serving.free_rows, **label)
            yield m.WAVE_S(sample.serving.wave_ms / 1e3, **label)

    def _link(self, sample: InstanceSample, peer: str, figures: LinkFigures) -> Iterable[m.MetricReading]:
        label = {"job": sample.job, "sid": sample.sid, "peer": peer, "cluster": self._cluster}
        if figures.latency_ms is not None:
            yield m.LINK_LATENCY_S(figures.latency_ms / 1e3, **label)
        if figures.bandwidth_bytes_per_s is not None:
            yield m.LINK_BANDWIDTH(figures.bandwidth_bytes_per_s, **label)
        yield m.LINK_LOSS(figures.loss, **label)

    def _devices(self) -> Iterable[m.MetricReading]:
        """The readings of each device, once however many instances are on it."""
        devices: dict[tuple[str, str], DeviceSample] = {}
        for instance in self._instances.values():
            if instance.sample.device is not None:
                devices[instance.sample.node, instance.sample.device.device] = instance.sample.device
        for (node, name), device in devices.items():
            gauges = (
                (m.UTILIZATION, device.utilization),
                (m.DEVICE_MEMORY, device.memory_used_bytes),
                (m.DEVICE_MEMORY_TOTAL, device.memory_total_bytes),
                (m.TEMPERATURE, device.temperature_c),
                (m.POWER, device.power_w),
                (m.ENERGY, device.energy_j),
                (m.ECC_ERRORS, device.ecc_errors),
                (m.XID_ERRORS, None if device.xid_errors is None else len(device.xid_errors)),
            )
            label = {"cluster": self._cluster, "node": node, "device": name}
            for metric, value in gauges:
                if value is not None:
                    yield metric(value, **label)
            if device.detail is not None:
                yield from _detail(device.detail, label)


def _detail(detail: DeviceDetail, label: dict[str, str]) -> Iterator[m.MetricReading]:
    gauges = (
        (m.POWER_LIMIT, detail.power_limit_w),
        (m.ECC_CORRECTED, detail.ecc_corrected),
        (m.PCIE_SENT, detail.pcie_sent_bytes),
        (m.PCIE_RECEIVED, detail.pcie_received_bytes),
        (m.NVLINK_SENT, detail.nvlink_sent_bytes),
        (m.NVLINK_RECEIVED, detail.nvlink_received_bytes),
    )
    for metric, value in gauges:
        if value is not None:
            yield metric(value, **label)
    for domain, mhz in (("sm", detail.clock_mhz), ("memory", detail.memory_clock_mhz)):
        if mhz is not None:
            yield m.CLOCK(mhz * 1e6, **label, domain=domain)
    if detail.throttle is not None:
        for reason in get_args(ThrottleReason):
            yield m.THROTTLED(reason in detail.throttle, **label, reason=reason)


def device_errors(sample: DeviceSample | None) -> DeviceErrors | None:
    """The errors of a device; None if it has none or does not report them."""
    if sample is None:
        return None
    xids = tuple(code for code in sample.xid_errors or () if code not in APPLICATION_XIDS)
    if not sample.ecc_errors and not xids:
        return None
    return DeviceErrors(device=sample.device, ecc_errors=sample.ecc_errors or 0, xid_errors=xids)
