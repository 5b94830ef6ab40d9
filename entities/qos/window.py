"""Type 5 upward: one cluster's communication quality over a window (draft §4.3, §4.4(3)).

Routers and gateways add samples, calls and microbatches, and take a report each second. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.signals import QosReport
from schemas.telemetry import DeviceSample, InstanceSample


@dataclass(slots=True)
class _Sums:
    sent_bytes: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    link_errors: int = 0
    calls: int = 0
    failed_calls: int = 0
    call_ms: float = 0.0
    microbatches: int = 0
    tokens_per_s: dict[str, tuple[int, float]] = field(default_factory=dict)
    hottest_c: float | None = None


class QosWindow:
    """Sums per job since the last report, and totals for its termination report."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self.total_microbatches: dict[str, int] = {}
        self.total_bytes: dict[str, int] = {}
        self._ecc_errors: dict[str, dict[str, tuple[int, int]]] = {}

    def add_sample(self, sample: InstanceSample) -> None:
        """Add a sample. Its link counters cover the time since the instance's last sample, so they add up."""
        sums = self._of(sample.job)
        for link in sample.links:
            sums.sent_bytes += link.sent_bytes
            sums.transfers += link.transfers
            sums.transfer_ms += link.transfer_ms
            sums.link_errors += link.errors
            self.total_bytes[sample.job] = self.total_bytes.get(sample.job, 0) + link.sent_bytes
        sums.tokens_per_s[sample.sid] = (sample.stage, sample.tokens_per_s)
        if sample.device is not None:
            self._add_device(sample.job, sample.node, sample.device)

    def _add_device(self, job: str, node: str, device: DeviceSample) -> None:
        """Add a device's figures. Several instances may share a device; its errors are counted once."""
        if device.temperature_c is not None:
            sums = self._of(job)
            sums.hottest_c = max(device.temperature_c, sums.hottest_c or device.temperature_c)
        if device.ecc_errors is not None:
            counts = self._ecc_errors.setdefault(job, {})
            first, _ = counts.get(f"{node}/{device.device}", (device.ecc_errors, 0))
            first = min(first, device.ecc_errors)  # a driver that was restarted counts from 0
            counts[f"{node}/{device.device}"] = (first, device.ecc_errors)

    def add_call(self, job: str, duration_ms: float, *, failed: bool) -> None:
        """Add one request of the gateway to an instance of the job."""
        sums = self._of(job)
        sums.calls += 1
        sums.failed_calls += failed
        sums.call_ms += duration_ms

    def add_microbatch(self, job: str) -> None:
        """Count a microbatch that an instance of this cluster accounted for."""
        self._of(job).microbatches += 1
        self.total_microbatches[job] = self.total_microbatches.get(job, 0) + 1

    def report(
        self, job: str, *, sid: str, cluster: str, window_s: float, instances: int, lost: int = 0
    ) -> QosReport:
        """The report of `job` over the last `window_s` seconds; starts the next window.

        Tokens/s: every token passes every stage, so the cluster's rate is that of its fastest stage,
        summed over the stage's instances. Latency is per transfer, or per call if there was no transfer.
        `lost` is how many messages our own bounded queues dropped in the window.
        """
        sums = self._sums.pop(job, _Sums())
        per_stage: dict[int, float] = {}
        for stage, rate in sums.tokens_per_s.values():
            per_stage[stage] = per_stage.get(stage, 0.0) + rate
        tries = sums.transfers + sums.link_errors + sums.calls
        received = len(sums.tokens_per_s) + sums.microbatches
        errors = [last - first for first, last in self._ecc_errors.get(job, {}).values()]
        if sums.transfers:
            latency_ms = sums.transfer_ms / sums.transfers
        else:
            latency_ms = sums.call_ms / sums.calls if sums.calls else 0.0
        return QosReport(
            sid=sid,
            cluster=cluster,
            window_s=window_s,
            throughput_bytes_per_s=sums.sent_bytes / window_s,
            throughput_tokens_per_s=max(per_stage.values(), default=0.0),
            latency_ms=latency_ms,
            error_rate=(sums.link_errors + sums.failed_calls) / tries if tries else 0.0,
            loss_rate=lost / (lost + received) if lost else 0.0,
            bandwidth_bytes_per_s=sums.sent_bytes / (sums.transfer_ms / 1e3) if sums.transfer_ms > 0 else 0.0,
            instances=instances,
            job=job,
            temperature_c=sums.hottest_c,
            ecc_errors=sum(errors) if errors else None,
        )

    def forget(self, job: str) -> tuple[int, int]:
        """Drop the job; return its total microbatches and bytes."""
        self._sums.pop(job, None)
        self._ecc_errors.pop(job, None)
        return self.total_microbatches.pop(job, 0), self.total_bytes.pop(job, 0)

    def _of(self, job: str) -> _Sums:
        return self._sums.setdefault(job, _Sums())
