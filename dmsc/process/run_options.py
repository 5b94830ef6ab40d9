"""The options of `dmsc run`: each is spelled once, here, and the command line shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dmsc.console.command_app import option
from dmsc.console.exit_codes import bad_input
from dmsc.console.options import (
    AccessFileOption,
    AllowUrlOption,
    BusTokenOption,
    LevelOption,
    MetricsBindOption,
    MetricsPortOption,
    ParentOption,
    PoolsOption,
    PricesOption,
    StateOption,
    TopologyOption,
    UserRateOption,
    WaitOption,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the entities of one process, and of the process."""

    bus: Annotated[
        str | None, option("--bus URL", "The bus's address, or several with commas ($DMSC_BUS).")
    ] = None
    bus_token: BusTokenOption = None
    clusters: Annotated[
        tuple[str, ...], option("--cluster NAME $DMSC_CLUSTER", "For gateway and router; repeatable.")
    ] = ()
    http_ports: Annotated[
        tuple[int, ...],
        option("--http-port PORT $DMSC_HTTP_PORT", "The port of a gateway's HTTP API; one per cluster."),
    ] = ()
    bind: Annotated[str, option("--bind ADDRESS $DMSC_BIND", "The address where HTTP APIs listen.")] = (
        "127.0.0.1"
    )
    tls_cert: Annotated[
        Path | None, option("--tls-cert FILE $DMSC_TLS_CERT", "The certificate for HTTPS; see `dmsc cert`.")
    ] = None
    tls_key: Annotated[
        Path | None, option("--tls-key FILE $DMSC_TLS_KEY", "The private key of the certificate.")
    ] = None
    proxies: Annotated[
        tuple[str, ...],
        option(
            "--proxy ADDRESS $DMSC_PROXY",
            "A proxy (or network) whose X-Forwarded-For header a gateway trusts; repeatable.",
        ),
    ] = ()
    user_rate: UserRateOption = 200.0
    tokens_file: Annotated[
        Path | None,
        option(
            "--tokens FILE $DMSC_TOKENS", "For the authorizer: the file of users, their roles and tokens."
        ),
    ] = None
    name: Annotated[
        str | None,
        option(
            "--name SID",
            "For an authorizer, broker or model registry: its name; if several run, each needs its own.",
        ),
    ] = None
    no_researchers: Annotated[
        bool,
        option(
            "--no-researchers $DMSC_NO_RESEARCHERS",
            "For the authorizer: refuse researchers, because this machine does not confine their code.",
        ),
    ] = False
    keys_file: Annotated[
        Path | None,
        option(
            "--keys FILE $DMSC_GUARD_KEYS",
            "For the authorizer: the keys of the bus's auth callout (guard.json of a state folder).",
        ),
    ] = None
    access_file: AccessFileOption = None
    allow_urls: AllowUrlOption = ()
    user_key: Annotated[
        Path | None,
        option(
            "--user-key FILE $DMSC_USER_KEY",
            "For the authorizer: the key that signs users' tokens; no one else may read this file.",
        ),
    ] = None
    audit_folder: Annotated[
        Path | None,
        option(
            "--audit-folder DIR $DMSC_AUDIT_FOLDER",
            "For the authorizer: where it keeps the audit records and their signed head, off the bus.",
        ),
    ] = None
    replicas: Annotated[
        int, option("--replicas $DMSC_REPLICAS", "Copies of streams and buckets on a NATS cluster.", min=1)
    ] = 1
    precedence: Annotated[
        str,
        option(
            "--precedence NAME,NAME $DMSC_PRECEDENCE",
            "For the orchestrator: policies by descending precedence; the first prevails over all.",
            show_default=False,
        ),
    ] = ""
    topology: TopologyOption = None
    automation: Annotated[
        str,
        option(
            "--automation off|advise|act $DMSC_AUTOMATION",
            "For the orchestrator: how far jobs are changed without a person, until one switches it.",
        ),
    ] = "act"
    own_loop: Annotated[
        str,
        option(
            "--own-loop on|off $DMSC_OWN_LOOP",
            "For the orchestrator: whether it suggests changes itself, or only modules do.",
        ),
    ] = "on"
    fault_answer: Annotated[
        float,
        option(
            "--fault-answer SECONDS $DMSC_FAULT_ANSWER",
            "For the orchestrator: how long modules that answer about a fault at hand are waited for.",
            min=0.001,
        ),
    ] = 0.05
    queue_order: Annotated[
        str,
        option(
            "--queue-order ORDER $DMSC_QUEUE_ORDER",
            "For the orchestrator: who comes first among waiting jobs: fcfs, priority, fair or las.",
        ),
    ] = "fcfs"
    queue_cool_down: Annotated[
        float,
        option(
            "--queue-cool-down SECONDS $DMSC_QUEUE_COOL_DOWN",
            "For the orchestrator: no job parks for another one sooner than this after its start.",
            min=0,
        ),
    ] = 600.0
    queue_half_life: Annotated[
        float,
        option(
            "--queue-half-life SECONDS $DMSC_QUEUE_HALF_LIFE",
            "For the orchestrator, order fair: after so long half of what a user has used is forgotten.",
            min=1,
        ),
    ] = 7 * 86400.0
    metrics_port: MetricsPortOption = "0"
    metrics_bind: MetricsBindOption = "127.0.0.1"
    peak_tflops: Annotated[
        float | None,
        option(
            "--peak-tflops $DMSC_PEAK_TFLOPS",
            "Peak of one device in 10¹² FLOP/s at the job's precision, to compute MFU.",
            min=0.001,
        ),
    ] = None
    energy_price: Annotated[
        float | None,
        option(
            "--energy-price $DMSC_ENERGY_PRICE", "Price of one kWh, to compute the cost of energy.", min=0
        ),
    ] = None
    slot_price: Annotated[
        float | None,
        option(
            "--slot-price $DMSC_SLOT_PRICE",
            "For gateways and accountant: price of one slot for an hour.",
            min=0,
        ),
    ] = None
    slot_watts: Annotated[
        float,
        option(
            "--slot-watts $DMSC_SLOT_WATTS",
            "For gateways, accountant: power of a slot whose device does not measure its energy.",
            min=0,
        ),
    ] = 15.0
    prices: PricesOption = None
    pools: PoolsOption = None
    tensorboard: Annotated[
        Path | None,
        option(
            "--tensorboard DIR $DMSC_TENSORBOARD", "For the tracker: a folder of TensorBoard's event files."
        ),
    ] = None
    mlflow: Annotated[
        str | None,
        option("--mlflow URI $DMSC_MLFLOW", "For the tracker: MLflow's server, folder or database."),
    ] = None
    wandb: Annotated[
        bool,
        option(
            "--wandb $DMSC_WANDB", "For the tracker: Weights & Biases, offline unless $WANDB_MODE says so."
        ),
    ] = False
    recording: Annotated[
        str | None,
        option("--from RUN", "For the tracker: a recorded run (a file or a job) instead of the live mesh."),
    ] = None
    since: Annotated[
        str | None,
        option(
            "--since AGO|DATE", "For the tracker: only jobs submitted since then (all that the stream has)."
        ),
    ] = None
    wait_s: WaitOption = 30.0
    state: StateOption = None
    log_level: LevelOption = "info"
    parent: ParentOption = None

    def __post_init__(self) -> None:
        """
        Raises:
            BadInput: A certificate has no key, or a key has no certificate.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise bad_input("--tls-cert and --tls-key belong together: give both, or neither")

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and the key of the HTTP APIs; None: plain HTTP."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return self.tls_cert, self.tls_key
