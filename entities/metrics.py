"""The one table of metrics, each with its kind, labels and meaning.

Calling a row with a value gives a `MetricReading`. Entities make their readings on a scrape; between scrapes
they keep nothing extra for them. Names and units follow Prometheus (base units, `_total` for counters). A
figure that was not measured is left out, not reported as 0. `docs/observability.md` has the same table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram: how many values are at most each of `bounds`; last, how many there are."""

    bounds: tuple[float, ...]
    below: tuple[int, ...]
    total: float
    """The sum of all values."""


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

    def spread(self, values: Distribution, **labels: str) -> MetricReading:
        """The reading of a histogram."""
        return MetricReading(self, tuple(labels[name] for name in self.labels), values.below[-1], values)


@dataclass(frozen=True, slots=True)
class MetricReading:
    """One value at this moment. `labels` has the labels' values, in the order of the metric's labels.

    That of a histogram is how many values it has; `values` says how they are spread.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float
    values: Distribution | None = None


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


@dataclass(frozen=True, slots=True)
class _MetricRows:
    """Adds rows that have one source, and these labels first."""

    source: str
    labels: tuple[str, ...] = ()

    def gauge(self, name: str, about: str, *labels: str) -> Metric:
        return self._add(name, "gauge", about, labels)

    def counter(self, name: str, about: str, *labels: str) -> Metric:
        return self._add(name, "counter", about, labels)

    def histogram(self, name: str, about: str, *labels: str) -> Metric:
        return self._add(name, "histogram", about, labels)

    def _add(self, name: str, kind: Kind, about: str, labels: tuple[str, ...]) -> Metric:
        row = Metric(f"dmsc_{name}", kind, about, self.source, (*self.labels, *labels))
        METRICS.append(row)
        return row


_ORCHESTRATOR = _MetricRows("orchestrator")
_JOB = _MetricRows("orchestrator", ("job",))
_BROKER = _MetricRows("broker")
_ACCOUNTANT = _MetricRows("accountant")
_MODELS = _MetricRows("model registry")
_PROVISIONER = _MetricRows("provisioner")
_ROUTER = _MetricRows("router")
_INSTANCE = _MetricRows("router", ("job", "stage", "sid", "cluster"))
_LINK = _MetricRows("router", ("job", "sid", "peer", "cluster"))
_DEVICE = _MetricRows("router", ("cluster", "node", "device"))
_NODE = _MetricRows("node agent", ("cluster", "node"))
_GATEWAY = _MetricRows("gateway", ("gateway",))
_SERVED = _MetricRows("gateway", ("gateway", "service", "version"))
_SERVICE = _MetricRows("every process", ("service",))
_PROCESS = _MetricRows("every process")

# --- jobs that have not ended, by the leading orchestrator ----------------------------------------------
JOBS = _ORCHESTRATOR.gauge("jobs", "jobs that have not ended, by state", "state")
QUEUE_JOBS = _ORCHESTRATOR.gauge("queue_jobs", "jobs that wait for slots")
QUEUE_BUILDS = _ORCHESTRATOR.gauge("queue_builds", "builds of data sets that wait for lanes")
QUEUE_FREE = _ORCHESTRATOR.gauge("queue_free_slots", "open slots that no job holds")
QUEUE_LACKING = _ORCHESTRATOR.gauge(
    "queue_lacking_slots", "slots that have to be there beside the free ones, for all waiting jobs to start"
)
MODULE_DRIFT = _ORCHESTRATOR.gauge(
    "module_drift", "1 while what a module learnt does not fit what happens", "module", "version"
)
JOB_STEP = _JOB.gauge("job_step", "steps decided so far")
JOB_TOKENS = _JOB.counter("job_tokens_total", "tokens of the steps decided so far")
JOB_TOKENS_PER_S = _JOB.gauge("job_tokens_per_second", "tokens/s of the last step")
JOB_STEP_S = _JOB.gauge("job_step_seconds", "duration of the last step")
JOB_LOSS = _JOB.gauge("job_loss", "mean training loss of the last step")
JOB_VALIDATION_LOSS = _JOB.gauge("job_validation_loss", "loss of the last validation")
JOB_CONVERGENCE = _JOB.gauge(
    "job_loss_decrease_per_million_tokens",
    "speed of convergence: the negative slope of a line through the last 50 losses",
)
JOB_GRADIENT_NORM = _JOB.gauge("job_gradient_norm", "gradient norm of the last step, before clipping")
JOB_LEARNING_RATE = _JOB.gauge("job_learning_rate", "learning rate of the last step")
JOB_MODEL_FLOPS = _JOB.gauge(
    "job_model_flops_per_second",
    "6 × parameters × tokens/s of the last step (Chowdhery et al. 2022, appendix B, without attention)",
)
JOB_MFU = _JOB.gauge(
    "job_mfu_ratio", "model FLOP/s ÷ peak of the job's devices; only if the peak is known (`--peak-tflops`)"
)
JOB_RECOVERIES = _JOB.counter("job_recoveries_total", "instances that were lost and replaced")
JOB_ALERT = _JOB.gauge("job_alert", "1 while an alert is raised", "kind")
JOB_ALERTS = _JOB.counter(
    "job_alerts_total", "alerts raised since this orchestrator took over the job", "kind"
)

# --- brokers -------------------------------------------------------------------------------------------
BROKER_CALLS = _BROKER.counter("broker_calls_total", "calls that were requested", "kind")
BROKER_REFUSED = _BROKER.counter("broker_refused_total", "requested calls that were refused", "kind")
BROKER_DROPPED = _BROKER.counter(
    "broker_dropped_total", "calls dropped because too many of one caller were waiting"
)
BROKER_WAITING = _BROKER.gauge("broker_waiting_calls", "calls that wait for their turn")

# --- accounts ---------------------------------------------------------------------------------------------
ACCOUNT_SECONDS = _ACCOUNTANT.counter(
    "account_device_seconds_total",
    "device-seconds by what they went into, since this accountant began",
    "use",
)
ACCOUNT_OFFERED = _ACCOUNTANT.counter(
    "account_offered_seconds_total", "device-seconds that nodes offered, since this accountant began"
)
ACCOUNT_LAG = _ACCOUNTANT.gauge("account_lag_seconds", "since the accounts were last brought up to date")
BUDGET_USED = _ACCOUNTANT.gauge(
    "budget_used_ratio", "share of a budget that is used; 1: used up", "owner", "per"
)

# --- model registries -----------------------------------------------------------------------------------
MODEL_VERSIONS = _MODELS.gauge("model_versions", "versions of models, removed ones too")
MODEL_MOVES = _MODELS.counter("model_alias_moves_total", "moves of aliases that were made")
MODEL_REFUSED = _MODELS.counter("model_refused_total", "requests about models that were refused")

# --- the provisioner ------------------------------------------------------------------------------------
MACHINES = _PROVISIONER.gauge("machines", "machines that have not ended", "pool", "state")
MACHINES_SPENT = _PROVISIONER.gauge("machines_spent_today", "what a pool has cost today (UTC)", "pool")
MACHINES_FAILURES = _PROVISIONER.gauge("machines_failures", "orders in a row that gave no machine", "pool")

# --- instances, by the router of their cluster ----------------------------------------------------------
QUEUE = _INSTANCE.gauge("instance_queue_microbatches", "microbatches that wait for its compute thread")
IN_FLIGHT = _INSTANCE.gauge(
    "instance_in_flight_microbatches", "microbatches that it has and has not finished"
)
MICROBATCHES = _INSTANCE.counter("instance_microbatches_total", "microbatches computed")
SERVICE_S = _INSTANCE.gauge("instance_service_seconds", "compute time per microbatch, forward and backward")
FORWARD_S = _INSTANCE.gauge("instance_forward_seconds", "compute time per microbatch, forward")
BACKWARD_S = _INSTANCE.gauge("instance_backward_seconds", "compute time per microbatch, backward")
BUSY = _INSTANCE.gauge("instance_busy_ratio", "part of the time in which it computed")
INSTANCE_TOKENS_PER_S = _INSTANCE.gauge(
    "instance_tokens_per_second", "tokens/s through it since its last sample"
)
ALLREDUCE_S = _INSTANCE.gauge("instance_allreduce_seconds", "duration of its last all-reduce")
RESIDENT = _INSTANCE.gauge("instance_resident_bytes", "resident memory of its process")
RETAINED = _INSTANCE.gauge(
    "instance_retained_bytes", "memory of the boundary tensors that it keeps until the step is stable"
)
SENT = _INSTANCE.counter("instance_sent_bytes_total", "bytes sent over its tensor links")
RECEIVED = _INSTANCE.counter("instance_received_bytes_total", "bytes received over its tensor links")
TRANSFERS = _INSTANCE.counter("instance_transfers_total", "transfers over its tensor links")
TRANSFER_S = _INSTANCE.counter("instance_transfer_seconds_total", "duration of these transfers in all")
LINK_ERRORS = _INSTANCE.counter("instance_link_errors_total", "transfers that failed")
DATA_STALL_S = _INSTANCE.counter(
    "instance_data_stall_seconds_total", "time in which a microbatch dispatched to it was not made yet"
)
DATA_BYTES = _INSTANCE.counter(
    "instance_data_bytes_total",
    "bytes of stores by where they came from: memory, disk (the node's cache), neighbour, store",
    "tier",
)
SERVING_SESSIONS = _INSTANCE.gauge("instance_sessions", "answers that it works on")
CACHE_ROWS = _INSTANCE.gauge("instance_cache_rows", "tokens that its keys and values have room for")
CACHE_FREE = _INSTANCE.gauge("instance_cache_free_rows", "of them, those that no answer may take")
WAVE_S = _INSTANCE.gauge("instance_wave_seconds", "duration of a wave, smoothed")
BUBBLE = _ROUTER.gauge(
    "stage_bubble_ratio",
    "pipeline bubble: 1 − busy, mean over the stage's instances in this cluster",
    *("job", "stage", "cluster"),
)
LINK_LATENCY_S = _LINK.gauge(
    "link_latency_seconds", "the part of a transfer's time that does not depend on its size"
)
LINK_BANDWIDTH = _LINK.gauge("link_bandwidth_bytes_per_second", "bandwidth, measured by its transfers")
LINK_LOSS = _LINK.gauge("link_loss_ratio", "share of the transfers that had to be repeated")
ROUTE_CHANGES = _ROUTER.counter(
    "route_changes_total", "route tables written by this router", *("job", "stage", "cluster")
)
REFUSED_SAMPLES = _ROUTER.counter("samples_refused_total", "samples with impossible figures", "cluster")

# --- devices of instances, by the same router -----------------------------------------------------------
UTILIZATION = _DEVICE.gauge("device_utilization_ratio", "utilization as the driver reports it")
DEVICE_MEMORY = _DEVICE.gauge("device_memory_used_bytes", "device memory in use, by all processes")
DEVICE_MEMORY_TOTAL = _DEVICE.gauge("device_memory_total_bytes", "device memory")
TEMPERATURE = _DEVICE.gauge("device_temperature_celsius", "temperature of the chip")
POWER = _DEVICE.gauge("device_power_watts", "present power draw")
ENERGY = _DEVICE.counter("device_energy_joules_total", "energy used since its driver was loaded")
ECC_ERRORS = _DEVICE.counter(
    "device_ecc_errors_total", "uncorrected memory errors since its driver was loaded"
)
XID_ERRORS = _DEVICE.counter("device_xid_errors_total", "critical errors that the driver reported")
ECC_CORRECTED = _DEVICE.counter(
    "device_ecc_corrected_errors_total", "corrected memory errors since its driver was loaded"
)
CLOCK = _DEVICE.gauge("device_clock_hertz", "present clock of `sm` or `memory`", "domain")
THROTTLED = _DEVICE.gauge("device_throttled", "1 while its clocks are lowered for this reason", "reason")
POWER_LIMIT = _DEVICE.gauge("device_power_limit_watts", "highest power that it may draw")
PCIE_SENT = _DEVICE.counter("device_pcie_sent_bytes_total", "bytes sent to its host, by all processes")
PCIE_RECEIVED = _DEVICE.counter("device_pcie_received_bytes_total", "bytes received from its host")
NVLINK_SENT = _DEVICE.counter("device_nvlink_sent_bytes_total", "bytes sent over all its NVLinks")
NVLINK_RECEIVED = _DEVICE.counter("device_nvlink_received_bytes_total", "bytes received over all its NVLinks")
JOB_ENERGY = _ROUTER.counter(
    "job_energy_joules_total",
    "energy of the devices of its instances, in equal parts where several jobs share a device",
    *("job", "cluster"),
)
JOB_ENERGY_COST = _ROUTER.counter(
    "job_energy_cost_total",
    "cost of that energy at the price of `--energy-price`; ÷ tokens it is the cost per token",
    *("job", "cluster"),
)

# --- nodes, by their agents -----------------------------------------------------------------------------
NODE_CPU = _NODE.gauge("node_cpu_ratio", "busy part of all cores")
NODE_MEMORY = _NODE.gauge("node_memory_used_bytes", "main memory in use")
NODE_MEMORY_TOTAL = _NODE.gauge("node_memory_total_bytes", "main memory")
NODE_SLOTS = _NODE.gauge("node_slots", "slots that the node offers")
NODE_INSTANCES = _NODE.gauge("node_instances", "instances that it runs")

# --- gateways -------------------------------------------------------------------------------------------
HTTP_REQUESTS = _GATEWAY.counter("http_requests_total", "requests answered by the HTTP API", "status")
HTTP_REFUSED = _GATEWAY.counter(
    "http_refused_total", "requests refused before they were processed, by reason", "reason"
)
HTTP_OPEN = _GATEWAY.gauge("http_requests_open", "requests being answered, without event streams")
HTTP_CONNECTIONS = _GATEWAY.gauge(
    "http_connections_open", "connections of HTTP clients, including event streams"
)
HTTP_CUT = _GATEWAY.counter(
    "http_connections_cut_total",
    "connections closed because they were too late (head, body, answer), sent too much (length), or made "
    "room for a new one (room)",
    "reason",
)
EVENT_STREAMS = _GATEWAY.gauge("event_streams_open", "event streams of HTTP clients")
EVENT_FEEDS = _GATEWAY.gauge("event_feeds_open", "consumers that supply these event streams")
STREAMS_LAGGED = _GATEWAY.counter(
    "event_streams_lagged_total", "event streams ended because the client read too slowly"
)
BREAKER_STATE = _GATEWAY.gauge("gateway_breaker_state", "0 closed, 1 half open, 2 open", "entity")
BREAKER_OPENED = _GATEWAY.counter("gateway_breaker_opened_total", "times that the breaker opened", "entity")
BUDGET_REFUSED = _GATEWAY.counter(
    "gateway_repeats_refused_total", "repetitions refused because they exceeded the budget"
)

# --- model services, by the gateways that answer --------------------------------------------------------
SERVICE_REQUESTS = _SERVED.counter(
    "service_requests_total",
    "requests that are over, by outcome: ok, cancelled, or the code of an error",
    "outcome",
)
SERVICE_TOKENS = _SERVED.counter(
    "service_tokens_total",
    "tokens of answers, and of prompts; those of an answer that another gateway went on with at both",
    "kind",
)
SERVICE_FIRST_TOKEN_S = _SERVED.histogram(
    "service_first_token_seconds", "from a session's begin at the gateway to its first token"
)
SERVICE_SESSIONS = _SERVED.gauge("service_sessions", "answers under way")
SERVICE_WAITING = _SERVED.gauge("service_waiting_sessions", "of them, those without a token yet")
SERVICE_WEIGHT = _SERVED.gauge("service_weight_ratio", "share of the traffic that the version should get")
SERVICE_READY = _SERVED.gauge("service_ready", "1 while each stage of the version has a probed replica")
SERVICE_REPLICAS = _SERVED.gauge("service_replicas", "replicas that the version should have", "stage")

# --- each connection to the bus, and each process -------------------------------------------------------
BUS_ROUND_TRIP_S = _SERVICE.gauge(
    "bus_round_trip_seconds", "bus latency: time of a message to oneself, measured at the scrape"
)
DEAD_LETTERS = _SERVICE.counter("bus_dead_letters_total", "received messages that could not be used")
DROPPED = _SERVICE.counter("bus_dropped_messages_total", "messages dropped because its queues were full")
HANDLER_ERRORS = _SERVICE.counter("bus_handler_errors_total", "errors raised by message handlers")
REPEATS = _SERVICE.counter("bus_command_repeats_total", "commands that were repeated")
RECONNECTS = _SERVICE.counter("bus_reconnects_total", "reconnections to the bus")
DENIED = _SERVICE.counter("bus_denied_total", "operations refused by the server")
LOG_LINES = _PROCESS.counter("log_lines_total", "log lines, by level", "level")
LOG_LINES_DROPPED = _PROCESS.counter(
    "log_lines_dropped_total", "log lines not sent to the bus: there were too many, or the bus was away"
)
SERIES_LEFT_OUT = _PROCESS.gauge("metrics_series_left_out", "series beyond the limit of one scrape")
