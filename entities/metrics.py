"""The one table of metrics, each with its kind, labels and meaning.

Calling a row with a value gives a `MetricReading`. Entities make their readings on a scrape; between scrapes
they keep nothing extra for them. Names and units follow Prometheus (base units, `_total` for counters). A
figure that was not measured is left out, not reported as 0. `docs/observability.md` has the same table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. Calling it with a value and all of its labels gives a reading."""

    name: str
    kind: Kind
    about: str
    source: str
    labels: tuple[str, ...]

    def __call__(self, value: float, **labels: str) -> MetricReading:
        return MetricReading(self, tuple(labels[name] for name in self.labels), value)


@dataclass(frozen=True, slots=True)
class MetricReading:
    """One value at this moment. `labels` has the labels' values, in the order of the metric's labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


@runtime_checkable
class Readable(Protocol):
    """A service with metrics. `readings` is called on the event loop and must not block."""

    def readings(self) -> Iterable[MetricReading]: ...


Render = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Renders a page: from the scraper's HTTP header `Accept` to the page and its content type."""


@runtime_checkable
class Scraped(Protocol):
    """A service whose HTTP server also serves this process's metrics."""

    exposition: Render | None


METRICS: list[Metric] = []
"""All rows, in the order of the documentation."""


def _metric(name: str, kind: Kind, about: str, source: str, *labels: str) -> Metric:
    row = Metric(f"dmsc_{name}", kind, about, source, labels)
    METRICS.append(row)
    return row


_SMO, _SR, _MIC, _MG = "orchestrator", "router", "node agent", "gateway"
_BROKER = "broker"
_EACH = "every process"
_INSTANCE = ("job", "stage", "sid", "cluster")
_DEVICE = ("cluster", "node", "device")

# --- jobs that have not ended, by the leading orchestrator ----------------------------------------------
JOBS = _metric("jobs", "gauge", "jobs that have not ended, by state", _SMO, "state")
JOB_STEP = _metric("job_step", "gauge", "steps decided so far", _SMO, "job")
JOB_TOKENS = _metric("job_tokens_total", "counter", "tokens of the steps decided so far", _SMO, "job")
JOB_TOKENS_PER_S = _metric("job_tokens_per_second", "gauge", "tokens/s of the last step", _SMO, "job")
JOB_STEP_S = _metric("job_step_seconds", "gauge", "duration of the last step", _SMO, "job")
JOB_LOSS = _metric("job_loss", "gauge", "mean training loss of the last step", _SMO, "job")
JOB_VALIDATION_LOSS = _metric("job_validation_loss", "gauge", "loss of the last validation", _SMO, "job")
JOB_CONVERGENCE = _metric(
    "job_loss_decrease_per_million_tokens",
    "gauge",
    "loss-convergence speed: slope of a line through the last 50 losses, downwards positive",
    _SMO,
    "job",
)
JOB_GRADIENT_NORM = _metric("job_gradient_norm", "gauge", "before clipping, of the last step", _SMO, "job")
JOB_LEARNING_RATE = _metric("job_learning_rate", "gauge", "of the last step", _SMO, "job")
JOB_MODEL_FLOPS = _metric(
    "job_model_flops_per_second",
    "gauge",
    "6 × parameters × tokens/s of the last step (Chowdhery et al. 2022, appendix B, without attention)",
    _SMO,
    "job",
)
JOB_MFU = _metric(
    "job_mfu_ratio",
    "gauge",
    "model FLOP/s ÷ peak of the job's devices; only where the peak is told (`--peak-tflops`)",
    _SMO,
    "job",
)
JOB_RECOVERIES = _metric("job_recoveries_total", "counter", "instances lost and replaced", _SMO, "job")
JOB_ALERT = _metric("job_alert", "gauge", "1 while an alert is raised", _SMO, "job", "kind")
JOB_ALERTS = _metric(
    "job_alerts_total",
    "counter",
    "alerts raised since this orchestrator took the job up",
    _SMO,
    "job",
    "kind",
)

# --- brokers -------------------------------------------------------------------------------------------
BROKER_CALLS = _metric("broker_calls_total", "counter", "calls that were asked for", _BROKER, "kind")
BROKER_REFUSED = _metric("broker_refused_total", "counter", "of them not made", _BROKER, "kind")
BROKER_DROPPED = _metric(
    "broker_dropped_total", "counter", "calls dropped: too many of one asker waited", _BROKER
)
BROKER_WAITING = _metric("broker_waiting_calls", "gauge", "calls that wait for their turn", _BROKER)

# --- instances, by the router of their cluster ----------------------------------------------------------
QUEUE = _metric("instance_queue_microbatches", "gauge", "waiting for its compute thread", _SR, *_INSTANCE)
IN_FLIGHT = _metric("instance_in_flight_microbatches", "gauge", "held and not finished", _SR, *_INSTANCE)
MICROBATCHES = _metric("instance_microbatches_total", "counter", "microbatches computed", _SR, *_INSTANCE)
SERVICE_S = _metric(
    "instance_service_seconds", "gauge", "compute per microbatch, forward and backward", _SR, *_INSTANCE
)
FORWARD_S = _metric("instance_forward_seconds", "gauge", "of it forward", _SR, *_INSTANCE)
BACKWARD_S = _metric("instance_backward_seconds", "gauge", "of it backward", _SR, *_INSTANCE)
BUSY = _metric("instance_busy_ratio", "gauge", "part of the time in which it computed", _SR, *_INSTANCE)
INSTANCE_TOKENS_PER_S = _metric(
    "instance_tokens_per_second", "gauge", "tokens/s through it since its last sample", _SR, *_INSTANCE
)
ALLREDUCE_S = _metric("instance_allreduce_seconds", "gauge", "its last all-reduce", _SR, *_INSTANCE)
RESIDENT = _metric("instance_resident_bytes", "gauge", "resident memory of its process", _SR, *_INSTANCE)
RETAINED = _metric(
    "instance_retained_bytes", "gauge", "boundary tensors kept until the step is stable", _SR, *_INSTANCE
)
SENT = _metric("instance_sent_bytes_total", "counter", "sent over its tensor links", _SR, *_INSTANCE)
RECEIVED = _metric("instance_received_bytes_total", "counter", "received over them", _SR, *_INSTANCE)
TRANSFERS = _metric("instance_transfers_total", "counter", "transfers over them", _SR, *_INSTANCE)
TRANSFER_S = _metric("instance_transfer_seconds_total", "counter", "time in them", _SR, *_INSTANCE)
LINK_ERRORS = _metric("instance_link_errors_total", "counter", "transfers that failed", _SR, *_INSTANCE)
BUBBLE = _metric(
    "stage_bubble_ratio",
    "gauge",
    "pipeline bubble: 1 − busy, mean over the stage's instances in this cluster",
    _SR,
    "job",
    "stage",
    "cluster",
)
LINK_LATENCY_S = _metric(
    "link_latency_seconds", "gauge", "of a transfer however small", _SR, "job", "sid", "peer", "cluster"
)
LINK_BANDWIDTH = _metric(
    "link_bandwidth_bytes_per_second", "gauge", "by its transfers", _SR, "job", "sid", "peer", "cluster"
)
LINK_LOSS = _metric(
    "link_loss_ratio", "gauge", "transfers that had to be made again", _SR, "job", "sid", "peer", "cluster"
)
ROUTE_CHANGES = _metric(
    "route_changes_total", "counter", "route tables written by this router", _SR, "job", "stage", "cluster"
)
REFUSED_SAMPLES = _metric(
    "samples_refused_total", "counter", "samples with figures that can't be", _SR, "cluster"
)

# --- devices of instances, by the same router -----------------------------------------------------------
UTILIZATION = _metric("device_utilization_ratio", "gauge", "as the driver tells it", _SR, *_DEVICE)
DEVICE_MEMORY = _metric("device_memory_used_bytes", "gauge", "in use, by whomever", _SR, *_DEVICE)
DEVICE_MEMORY_TOTAL = _metric("device_memory_total_bytes", "gauge", "what it has", _SR, *_DEVICE)
TEMPERATURE = _metric("device_temperature_celsius", "gauge", "of the chip", _SR, *_DEVICE)
POWER = _metric("device_power_watts", "gauge", "drawn now", _SR, *_DEVICE)
ENERGY = _metric("device_energy_joules_total", "counter", "since its driver came up", _SR, *_DEVICE)
ECC_ERRORS = _metric("device_ecc_errors_total", "counter", "uncorrected, since then", _SR, *_DEVICE)
XID_ERRORS = _metric("device_xid_errors_total", "counter", "critical errors told", _SR, *_DEVICE)
ECC_CORRECTED = _metric(
    "device_ecc_corrected_errors_total", "counter", "corrected, since its driver came up", _SR, *_DEVICE
)
CLOCK = _metric("device_clock_hertz", "gauge", "now; of `sm` or `memory`", _SR, *_DEVICE, "domain")
THROTTLED = _metric(
    "device_throttled", "gauge", "1 while its clocks are lowered for this reason", _SR, *_DEVICE, "reason"
)
POWER_LIMIT = _metric("device_power_limit_watts", "gauge", "what it may draw", _SR, *_DEVICE)
PCIE_SENT = _metric("device_pcie_sent_bytes_total", "counter", "to its host, by all processes", _SR, *_DEVICE)
PCIE_RECEIVED = _metric("device_pcie_received_bytes_total", "counter", "from its host", _SR, *_DEVICE)
NVLINK_SENT = _metric("device_nvlink_sent_bytes_total", "counter", "over all its NVLinks", _SR, *_DEVICE)
NVLINK_RECEIVED = _metric("device_nvlink_received_bytes_total", "counter", "over them", _SR, *_DEVICE)
JOB_ENERGY = _metric(
    "job_energy_joules_total",
    "counter",
    "of the devices of its instances, halved, … where jobs share one",
    _SR,
    "job",
    "cluster",
)
JOB_ENERGY_COST = _metric(
    "job_energy_cost_total",
    "counter",
    "the same at the price of `--energy-price`; ÷ tokens it is the cost per token",
    _SR,
    "job",
    "cluster",
)

# --- nodes, by their agents -----------------------------------------------------------------------------
NODE_CPU = _metric("node_cpu_ratio", "gauge", "busy, over all cores", _MIC, "cluster", "node")
NODE_MEMORY = _metric("node_memory_used_bytes", "gauge", "main memory in use", _MIC, "cluster", "node")
NODE_MEMORY_TOTAL = _metric("node_memory_total_bytes", "gauge", "main memory", _MIC, "cluster", "node")
NODE_SLOTS = _metric("node_slots", "gauge", "slots that the node offers", _MIC, "cluster", "node")
NODE_INSTANCES = _metric("node_instances", "gauge", "instances that it runs", _MIC, "cluster", "node")

# --- gateways -------------------------------------------------------------------------------------------
HTTP_REQUESTS = _metric(
    "http_requests_total", "counter", "answered at the HTTP door", _MG, "gateway", "status"
)
HTTP_REFUSED = _metric(
    "http_refused_total", "counter", "refused before they were looked at, by reason", _MG, "gateway", "reason"
)
HTTP_OPEN = _metric("http_requests_open", "gauge", "being answered, event streams left out", _MG, "gateway")
HTTP_CONNECTIONS = _metric(
    "http_connections_open", "gauge", "of HTTP clients, with event streams", _MG, "gateway"
)
HTTP_CUT = _metric(
    "http_connections_cut_total",
    "counter",
    "too late (head, body, answer), too long (length), or in the way of a newcomer (room)",
    _MG,
    "gateway",
    "reason",
)
EVENT_STREAMS = _metric("event_streams_open", "gauge", "event streams of HTTP clients", _MG, "gateway")
EVENT_FEEDS = _metric("event_feeds_open", "gauge", "consumers that feed them", _MG, "gateway")
STREAMS_LAGGED = _metric(
    "event_streams_lagged_total", "counter", "ended because the client read too slowly", _MG, "gateway"
)
BREAKER_STATE = _metric(
    "gateway_breaker_state", "gauge", "0 closed, 1 half open, 2 open", _MG, "gateway", "entity"
)
BREAKER_OPENED = _metric(
    "gateway_breaker_opened_total", "counter", "times that it opened", _MG, "gateway", "entity"
)
BUDGET_REFUSED = _metric(
    "gateway_repeats_refused_total", "counter", "repetitions beyond the budget", _MG, "gateway"
)

# --- each connection to the bus, and each process -------------------------------------------------------
BUS_ROUND_TRIP_S = _metric(
    "bus_round_trip_seconds",
    "gauge",
    "bus latency: a message to oneself, measured at the scrape",
    _EACH,
    "service",
)
DEAD_LETTERS = _metric("bus_dead_letters_total", "counter", "messages it could not use", _EACH, "service")
DROPPED = _metric("bus_dropped_messages_total", "counter", "beyond its bounded queues", _EACH, "service")
HANDLER_ERRORS = _metric("bus_handler_errors_total", "counter", "handlers that raised", _EACH, "service")
REPEATS = _metric("bus_command_repeats_total", "counter", "commands asked again", _EACH, "service")
RECONNECTS = _metric("bus_reconnects_total", "counter", "connections made again", _EACH, "service")
DENIED = _metric("bus_denied_total", "counter", "refusals by the server", _EACH, "service")
LOG_LINES = _metric("log_lines_total", "counter", "log lines, by level", _EACH, "level")
LOG_LINES_DROPPED = _metric(
    "log_lines_dropped_total", "counter", "lines that did not get to the bus: too many, or it was away", _EACH
)
SERIES_LEFT_OUT = _metric("metrics_series_left_out", "gauge", "series beyond the bound of one scrape", _EACH)
