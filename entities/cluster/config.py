"""A node agent's settings, checked when they are made."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from entities.cluster.core import EmulatedSlot
from entities.cluster.fork_server_client import Confinement
from schemas.base import is_token
from schemas.errors import BadInput
from schemas.names import agent_name, misplaced


def default_node() -> str:
    """This machine's host name as one subject token."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname()).strip("-")[:60] or "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes:
    """Periods and limits of a node agent."""

    process_check_s: float = 0.2
    """How often process states are checked: a stopped process does not report it, and its missing heartbeats
    are noticed much later."""
    renewal_check_s: float = 0.25
    """How often an agent checks for a new credential."""
    start_ready_s: float = 30.0
    """How long a start waits for a fork server that is being restarted."""
    worker_ready_s: float = 30.0
    """The same for a short-lived worker."""
    file_ready_s: float = 10.0
    """The same for a worker that opens files."""
    read_s: float = 20.0
    """Limit of one read: an object storage that does not answer delays others by no more than this."""
    code_s: float = 60.0
    """Limit of fetching a small archive of code; a large one gets more time (SLOWEST_BYTES_PER_S)."""
    cache_check_s: float = 60.0
    """How often the cache is held to its limit: longer lets a process that ignores it write more."""
    remove_s: float = 120.0
    """Limit of one removal: an object storage removes objects one by one. The next removal takes the rest."""
    command_s: float = 30.0
    """Deadline of one attempt of a command that should arrive even if its receiver is being restarted."""
    command_attempts: int = 120
    """In all an hour in which the bus is heard: a leader answers nobody while the bus takes no writes."""
    measure_s: float = 30.0
    """Limit of the standard stage: it takes less than a second, on a GPU that wakes up some seconds. A device
    beyond it is offered without figures."""
    measuring_look_s: float = 0.05
    """Pause before an agent looks again whether another one of this node has measured."""
    measure_again_s: float = 60.0
    """How often an agent looks whether its node rests, where devices were measured beside other work."""
    chain_check_s: float = 1.0
    """How often the instances' progress is judged; samples come as often."""
    slow_slot_s: float = 600.0
    """How long a slot counts as slow after its slow instance has left, unless another one does well in it."""
    links_s: float = 5.0
    """How often links that jobs have measured are registered, if they have changed."""
    leave_told_s: float = 2.0
    """Deadline of one attempt to tell the orchestrator that this node leaves."""
    leave_again_s: float = 0.3
    """Pause before the next one."""
    last_reports_s: float = 2.0
    """Limit for reporting the last instances' ends to the registry at shutdown."""


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """When an instance is called stalled, or underperforming (`judgement.chain_detector`)."""

    stalled_times: float = 20.0
    """Times the usual time of a microbatch without progress: garbage collection, a page-in and a busy machine
    take a few."""
    stalled_least_s: float = 30.0
    """But no sooner than this, after which the orchestrator begins a step again, too."""
    first_s: float = 300.0
    """Likewise before the first microbatch: layers may be compiled in it."""
    hung_times: float = 6.0
    """After so many times that limit it will not go on by itself, even if it computes."""
    silent_s: float = 30.0
    """A process that runs and has sent no sample for so long is stalled, if it had work."""
    broken_link_s: float = 30.0
    """A link that failed so long ago, and over which nothing has gone since, says nothing any more."""
    slow: float = 3.0
    """Times what the plan expects: below it, windows and routes compensate."""
    well: float = 2.0
    """Below this it is well again; the gap to `slow` is the hysteresis."""
    confirm: int = 5
    """Samples in a row, each with new work, for a change."""
    least_excess_ms: float = 10.0
    """Less than this beyond what is expected makes nobody slow: calls, clocks and the system take that."""

    def __post_init__(self) -> None:
        if not 1 < self.well < self.slow:
            raise ValueError(f"well {self.well} must be between 1 and slow {self.slow}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One node agent's settings."""

    cluster: str
    node: str = field(default_factory=default_node)
    slots: int | None = None
    """Stage instances at a time; None: one per CUDA device, else one per CPU core."""
    device: Literal["auto", "cpu"] = "auto"
    """`cpu` ignores GPUs."""
    address: str = "127.0.0.1"
    """The address that other nodes' instances connect to; must be reachable from all of them."""
    ports: tuple[int, int] | None = None
    """First and last TCP port of the tensor links; None: the system chooses."""
    servers: tuple[str, ...] = ()
    """Bus addresses for the instances."""
    token: str | None = field(default=None, repr=False)
    """The agent's credential, from which the instances' ones are delegated; or a plain token for all."""
    code_path: tuple[str, ...] = ()
    """Folders with users' modules, last on the instances' `sys.path`."""
    logs: Path = Path(".dmsc/logs")
    stores: Path | None = None
    """The instances' local stores; None: a folder `stores` beside the logs."""
    cache: Path | None = None
    """The blocks of remote data that instances read; None: a folder `cache` beside the logs."""
    cache_bytes: int | None = None
    """The most that they take; None: a quarter of what is free, at most 32 GiB; 0: nothing is kept."""
    keep_stores: bool = False
    """Whether local stores stay after their job has been cleaned up."""
    stop_grace_s: float = 3.0
    """From SIGTERM to SIGKILL when an instance is stopped: longer lets it drain, shorter frees it sooner."""
    analysis_timeout_s: float = 120.0
    """Longest time in which the worker of an analysis or a sample may neither compute nor read nor write."""
    analysis_alone_s: float = 600.0
    """After this a worker no longer has the node to itself. Shorter lets other jobs begin sooner beside a
    model that computes for ever; longer disturbs fewer measurements of very large models."""
    status_every_s: float = 5.0
    """How often this node's status is sent to the orchestrator if nothing changes."""
    sample_every_s: float = 2.0
    """Period of the node's telemetry."""
    account_every_s: float = 5.0
    """How often the accountant is told who holds the slots: a killed agent's last seconds up to this are
    in no account."""
    rests_below: float = 0.25
    """Busy part of all cores, below which devices that were measured beside other work are measured again."""
    worker_package: str = "workers"
    """The package in which the fork server finds `instance`, `analysis`, `sample` and `files`."""
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """How instances are started; `auto` forks where that is safe."""
    allow_urls: tuple[str, ...] | None = None
    """Folders and URLs that jobs may name besides the working directory and the bus; None: all."""
    confinement: Confinement | None = None
    """Isolation of users' code from the rest of this machine; None: no isolation."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the operator says of this node; plans may ask for it (`entities.cluster.capabilities.labels`)."""
    emulated_slots: tuple[EmulatedSlot, ...] = ()
    """Slots that stand for other devices, for tests and benchmarks; they replace `slots`."""
    emulation: Path | None = None
    """The folder with the scripts of emulated slots, in CLUSTER/NODE (`schemas.slot_conditions`)."""
    device_kinds: tuple[str, ...] = ()
    """`module:NAME` of kinds of devices beside CPU and CUDA (`workers.devices.device_kind`)."""
    capabilities: Path | None = None
    """Where measurements of devices are kept; None: in the user's cache (XDG_CACHE_HOME)."""
    chains: ChainConfig = field(default_factory=ChainConfig)
    """When an instance is judged stalled, or slower than the plan expects."""
    times: ClusterTimes = ClusterTimes()

    def __post_init__(self) -> None:
        for name, value in (("cluster", self.cluster), ("node", self.node)):
            if not is_token(value):
                raise BadInput(f"{name} {value!r}: use only letters, digits, _ and -, at most 120")
        if (why := misplaced(self.cluster, self.node)) is not None:
            raise BadInput(why)
        if self.emulation is not None and not self.emulated_slots:
            raise BadInput(
                f"--emulation {self.emulation}: only emulated slots follow it; add --emulate-slot 1"
            )
        if not is_token(self.sid):
            raise BadInput(f"cluster and node together exceed 119 characters: {self.sid}")
        if self.slots is not None and self.slots < 0:
            raise BadInput(f"slots {self.slots}: must be 0 or more")
        if self.ports is not None and not 0 < self.ports[0] <= self.ports[1] < 65536:
            raise BadInput(f"ports {self.ports[0]}-{self.ports[1]}: must be first-last within 1-65535")

    @property
    def sid(self) -> str:
        """The agent's SID."""
        return agent_name(self.cluster, self.node)

    @property
    def end_s(self) -> float:
        """What the agent's own end takes at most where instances are left: to end and to report them."""
        return self.stop_grace_s + self.times.last_reports_s

    @property
    def code_root(self) -> Path:
        """This agent's own folder of code that came with jobs, below that of stores, which jobs don't see."""
        return self.store_root.absolute().parent / "code" / self.sid

    @property
    def store_root(self) -> Path:
        """This agent's own folder of stores: several agents of a machine may share the one above."""
        return (self.stores or self.logs.absolute().parent / "stores") / self.sid

    @property
    def cache_root(self) -> Path:
        """This agent's own part of the cache's folder."""
        return (self.cache or self.logs.absolute().parent / "cache") / self.sid
