"""The tracer: follows the stream of job events, and exports their spans with OpenTelemetry's own exporter.

It is a separate service, like a functional module (`dmsc run tracer`), so that it costs other services
nothing. It needs the extra `otel`, which nothing else imports. OpenTelemetry's standard variables say where
spans are sent (OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_BSP_…).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from dmsc.tracing.spans import JobTrace, TraceSpan
from schemas.errors import BadInput, DmscError, Unavailable
from schemas.job import ENDED, JobEvent, JobRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = get_logger("tracer")

JOBS_KEPT = 1_024
"""The maximal number of open traces; if there are more, the oldest is dropped."""


@dataclass(frozen=True, kw_only=True)
class TracerConfig:
    """The tracer's configuration."""

    every_steps: int = 10  # only every so many-th step becomes a span, so that long traces stay readable
    retry_s: float = 0.25  # until a request for a job is repeated
    since: float | None = None  # spans that ended before are not exported; epoch seconds; None: the start


class Tracer:
    """Follows all jobs of a mesh, and calls `export` with each span when it ends."""

    def __init__(
        self, bus: Bus, export: Callable[[TraceSpan], None], config: TracerConfig | None = None
    ) -> None:
        self._bus = bus
        self._export = export
        self._config = config or TracerConfig()
        self._traces: dict[str, JobTrace | None] = {}

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Run until cancelled. The past events of running jobs are read first."""
        since = time.time() if self._config.since is None else self._config.since
        async with aclosing(self._bus.history(subjects.JOB_EVENT, follow=True)) as events:
            if ready is not None:
                ready.set()
            log.info("tracer ready", every_steps=self._config.every_steps)
            async for recorded in events:
                event = recorded.message
                assert isinstance(event, JobEvent)
                trace = await self._trace(event.job)
                if trace is None:
                    continue
                for span in trace.add(event):
                    if span.end >= since:
                        self._export(span)
                if event.state in ENDED:
                    self._traces.pop(event.job, None)

    async def _trace(self, job: str) -> JobTrace | None:
        """The trace of a job; None if the job's record does not exist any more."""
        if job not in self._traces:
            record = await self._record(job)
            while len(self._traces) >= JOBS_KEPT:
                del self._traces[next(iter(self._traces))]
            self._traces[job] = None if record is None else JobTrace(record, self._config.every_steps)
        return self._traces[job]

    async def _record(self, job: str) -> JobRecord | None:
        while True:
            try:
                entry = await self._bus.bucket(subjects.JOB_RECORD).get(job=job)
                return None if entry is None else entry.message
            except Unavailable:  # the server restarts; the job's events wait meanwhile
                await asyncio.sleep(self._config.retry_s)
            except DmscError as error:
                log.warning("job not traced", job=job, reason=error.text)
                return None


class SpanExport:
    """Converts spans to OpenTelemetry's form; its SDK batches and sends them.

    Raises:
        BadInput: The extra `otel` is not installed.
    """

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise BadInput("tracing needs OpenTelemetry's SDK: pip install 'dmsc[otel]'") from None
        self._provider: TracerProvider = TracerProvider()  # reads OTEL_RESOURCE_ATTRIBUTES, …_SAMPLER
        self._processor = processor or BatchSpanProcessor(_otlp())

    def __call__(self, span: TraceSpan) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace = int(span.trace, 16)
        result = self._provider.sampler.should_sample(None, trace, span.name)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return
        flags = TraceFlags(TraceFlags.SAMPLED)
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=SpanContext(trace, int(span.id, 16), is_remote=False, trace_flags=flags),
                parent=None
                if span.parent is None
                else SpanContext(trace, int(span.parent, 16), is_remote=False, trace_flags=flags),
                resource=self._provider.resource,
                attributes=span.attributes,
                events=[Event(name, {"text": text}, timestamp=_ns(at)) for at, name, text in span.events],
                kind=SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
                start_time=_ns(span.start),
                end_time=_ns(span.end),
            )
        )

    def close(self, within_ms: int = 5_000) -> None:
        """Send the waiting spans, for at most `within_ms`, and shut down."""
        self._processor.force_flush(within_ms)
        self._processor.shutdown()


class TracerService:
    """The tracer as a service of `dmsc run`. Its exporter is closed when it ends."""

    def __init__(self, bus: Bus, export: SpanExport, config: TracerConfig | None = None) -> None:
        self._export = export
        self._tracer = Tracer(bus, export, config)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        try:
            await self._tracer.run(ready)
        finally:
            await asyncio.to_thread(self._export.close)


def _otlp() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise BadInput("tracing needs OpenTelemetry's OTLP exporter: pip install 'dmsc[otel]'") from None
    return OTLPSpanExporter()


def _ns(at: float) -> int:
    return int(at * 1e9)
