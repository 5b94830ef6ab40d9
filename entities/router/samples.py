"""The last samples of a cluster's instances, and what adds up from one to the next. Pure.

A router keeps them as they come, which costs a look-up and a few additions a sample; readings are made when
somebody asks. Who is not among the present instances any more has no readings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import get_args

from entities import metrics as m
from schemas.fault import DeviceErrors
from schemas.telemetry import (
    APPLICATION_XIDS,
    DeviceDetail,
    DeviceSample,
    InstanceSample,
    LinkFigures,
    ThrottleReason,
)

JOULES_PER_KWH = 3.6e6
MOST_LINK_SERIES = 3_000
"""Series of single links that one router tells; the sums of each instance are always there."""


@dataclass(slots=True)
class _LastSample:
    """One SID. The sums outlive an incarnation, so that counters never fall; `microbatches` are those of
    the incarnations before the present one."""

    sample: InstanceSample
    sent: int = 0
    received: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0
    microbatches: int = 0
    figures: dict[str, LinkFigures] = field(default_factory=dict)

    def take(self, sample: InstanceSample) -> None:
        if sample.incarnation != self.sample.incarnation:
            self.microbatches += self.sample.microbatches
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
    """Of one cluster. `price_per_kwh`: what energy costs, in any currency; None: not told."""

    def __init__(self, cluster: str, price_per_kwh: float | None = None) -> None:
        self._cluster = cluster
        self._price_per_kwh = price_per_kwh
        self._held: dict[str, _LastSample] = {}
        self._energy_j: dict[tuple[str, str], float] = {}  # (node, device) → its counter, when last told
        self._job_energy_j: dict[str, float] = defaultdict(float)

    def take(self, sample: InstanceSample) -> None:
        """One sample; they come in order."""
        held = self._held.get(sample.sid)
        if held is None:
            held = self._held[sample.sid] = _LastSample(sample)
        held.take(sample)
        if sample.device is not None and sample.device.energy_j is not None:
            self._spend(sample.node, sample.device.device, sample.device.energy_j)

    def _spend(self, node: str, device: str, counter_j: float) -> None:
        """What a device has used since it was last told of goes to the jobs on it, in equal parts."""
        before_j = self._energy_j.get((node, device), counter_j)
        self._energy_j[node, device] = counter_j
        if counter_j <= before_j:  # the first word of it, or a driver that was started again
            return
        jobs = {
            held.sample.job
            for held in self._held.values()
            if held.sample.node == node
            and held.sample.device is not None
            and held.sample.device.device == device
        }
        for job in jobs:
            self._job_energy_j[job] += (counter_j - before_j) / len(jobs)

    def forget(self, job: str) -> None:
        """The job has ended: its series go."""
        self._held = {sid: held for sid, held in self._held.items() if held.sample.job != job}
        self._job_energy_j.pop(job, None)

    def readings(self, present: Collection[str]) -> Iterator[m.MetricReading]:
        """Of the instances `present` (SIDs); the others are forgotten."""
        for sid in self._held.keys() - set(present):
            del self._held[sid]
        busy: dict[tuple[str, str], list[float]] = defaultdict(list)
        links = 0
        for held in self._held.values():
            sample = held.sample
            yield from self._instance(held)
            if sample.stage >= 0:
                busy[sample.job, str(sample.stage)].append(sample.busy)
            for peer, figures in held.figures.items():
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

    def _instance(self, held: _LastSample) -> Iterable[m.MetricReading]:
        sample = held.sample
        label = {"job": sample.job, "stage": str(sample.stage), "sid": sample.sid, "cluster": self._cluster}
        yield m.IN_FLIGHT(sample.in_flight, **label)
        yield m.MICROBATCHES(held.microbatches + sample.microbatches, **label)
        yield m.RESIDENT(sample.resident_bytes, **label)
        yield m.SENT(held.sent, **label)
        yield m.RECEIVED(held.received, **label)
        yield m.TRANSFERS(held.transfers, **label)
        yield m.TRANSFER_S(held.transfer_ms / 1e3, **label)
        yield m.LINK_ERRORS(held.errors, **label)
        if sample.stage < 0:  # a data instance computes nothing
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

    def _link(self, sample: InstanceSample, peer: str, figures: LinkFigures) -> Iterable[m.MetricReading]:
        label = {"job": sample.job, "sid": sample.sid, "peer": peer, "cluster": self._cluster}
        if figures.latency_ms is not None:
            yield m.LINK_LATENCY_S(figures.latency_ms / 1e3, **label)
        if figures.bandwidth_bytes_per_s is not None:
            yield m.LINK_BANDWIDTH(figures.bandwidth_bytes_per_s, **label)
        yield m.LINK_LOSS(figures.loss, **label)

    def _devices(self) -> Iterable[m.MetricReading]:
        """Each device once, however many instances are on it."""
        devices: dict[tuple[str, str], DeviceSample] = {}
        for held in self._held.values():
            if held.sample.device is not None:
                devices[held.sample.node, held.sample.device.device] = held.sample.device
        for (node, name), device in devices.items():
            told = (
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
            for metric, value in told:
                if value is not None:
                    yield metric(value, **label)
            if device.detail is not None:
                yield from _detail(device.detail, label)


def _detail(detail: DeviceDetail, label: dict[str, str]) -> Iterator[m.MetricReading]:
    told = (
        (m.POWER_LIMIT, detail.power_limit_w),
        (m.ECC_CORRECTED, detail.ecc_corrected),
        (m.PCIE_SENT, detail.pcie_sent_bytes),
        (m.PCIE_RECEIVED, detail.pcie_received_bytes),
        (m.NVLINK_SENT, detail.nvlink_sent_bytes),
        (m.NVLINK_RECEIVED, detail.nvlink_received_bytes),
    )
    for metric, value in told:
        if value is not None:
            yield metric(value, **label)
    for domain, mhz in (("sm", detail.clock_mhz), ("memory", detail.memory_clock_mhz)):
        if mhz is not None:
            yield m.CLOCK(mhz * 1e6, **label, domain=domain)
    if detail.throttle is not None:
        for reason in get_args(ThrottleReason):
            yield m.THROTTLED(reason in detail.throttle, **label, reason=reason)


def device_errors(sample: DeviceSample | None) -> DeviceErrors | None:
    """What is wrong with the device; None where nothing is, or nobody can tell."""
    if sample is None:
        return None
    xids = tuple(code for code in sample.xid_errors or () if code not in APPLICATION_XIDS)
    if not sample.ecc_errors and not xids:
        return None
    return DeviceErrors(device=sample.device, ecc_errors=sample.ecc_errors or 0, xid_errors=xids)
