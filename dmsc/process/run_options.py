"""The options of `dmsc run`: each is spelled once, here, and the command line shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dmsc.console.options import (
    AccessFileOption,
    AllowUrlOption,
    BusTokenOption,
    LevelOption,
    MetricsBindOption,
    MetricsPortOption,
    ParentOption,
    StateOption,
    WaitOption,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the entities of one process, and of the process."""

    bus: Annotated[
        str | None,
        typer.Option("--bus", metavar="URL", help="The bus's address, or several with commas ($DMSC_BUS)."),
    ] = None
    bus_token: BusTokenOption = None
    clusters: Annotated[
        tuple[str, ...],
        typer.Option(
            "--cluster", metavar="NAME", envvar="DMSC_CLUSTER", help="For gateway and router; repeatable."
        ),
    ] = ()
    http_ports: Annotated[
        tuple[int, ...],
        typer.Option(
            "--http-port",
            metavar="PORT",
            envvar="DMSC_HTTP_PORT",
            help="The port of a gateway's HTTP API; one per cluster.",
        ),
    ] = ()
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", envvar="DMSC_BIND", help="The address where HTTP APIs listen.")
    ] = "127.0.0.1"
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            envvar="DMSC_TLS_CERT",
            help="The certificate for HTTPS; see `dmsc cert`.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key", metavar="FILE", envvar="DMSC_TLS_KEY", help="The private key of the certificate."
        ),
    ] = None
    proxies: Annotated[
        tuple[str, ...],
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            envvar="DMSC_PROXY",
            help="A proxy (or network) whose X-Forwarded-For header a gateway trusts; repeatable.",
        ),
    ] = ()
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            envvar="DMSC_TOKENS",
            help="For the authorizer: the file of users, their roles and tokens.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="SID",
            help="For an authorizer or broker: its name; if several run, each needs its own.",
        ),
    ] = None
    no_researchers: Annotated[
        bool,
        typer.Option(
            "--no-researchers",
            envvar="DMSC_NO_RESEARCHERS",
            help="For the authorizer: refuse researchers, because this machine does not confine their code.",
        ),
    ] = False
    keys_file: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            envvar="DMSC_GUARD_KEYS",
            help="For the authorizer: the keys of the bus's auth callout (guard.json of a state folder).",
        ),
    ] = None
    access_file: AccessFileOption = None
    allow_urls: AllowUrlOption = ()
    user_key: Annotated[
        Path | None,
        typer.Option(
            "--user-key",
            metavar="FILE",
            envvar="DMSC_USER_KEY",
            help="For the authorizer: the key that signs users' tokens; no one else may read this file.",
        ),
    ] = None
    audit_folder: Annotated[
        Path | None,
        typer.Option(
            "--audit-folder",
            metavar="DIR",
            envvar="DMSC_AUDIT_FOLDER",
            help="For the authorizer: where it keeps the audit records and their signed head, off the bus.",
        ),
    ] = None
    replicas: Annotated[
        int,
        typer.Option(min=1, envvar="DMSC_REPLICAS", help="Copies of streams and buckets on a NATS cluster."),
    ] = 1
    precedence: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            envvar="DMSC_PRECEDENCE",
            help="For the orchestrator: policies by descending precedence; the first prevails over all.",
            show_default=False,
        ),
    ] = ""
    metrics_port: MetricsPortOption = "0"
    metrics_bind: MetricsBindOption = "127.0.0.1"
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            "--peak-tflops",
            min=0.001,
            envvar="DMSC_PEAK_TFLOPS",
            help="Peak of one device in 10¹² FLOP/s at the job's precision, to compute MFU.",
        ),
    ] = None
    energy_price: Annotated[
        float | None,
        typer.Option(
            "--energy-price",
            min=0,
            envvar="DMSC_ENERGY_PRICE",
            help="Price of one kWh, to compute the cost of energy.",
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
            from schemas.errors import BadInput

            raise BadInput("--tls-cert and --tls-key belong together: give both, or neither")

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and the key of the HTTP APIs; None: plain HTTP."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return self.tls_cert, self.tls_key
