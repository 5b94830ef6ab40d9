"""DMSC: trains large models as microservices on a message bus.

This package is the front door: the command line, the clients, and the composition of services into processes.
It may import all other packages; none of them imports it. It exports the few names that a notebook, a script
or a user's own policy needs. They are loaded when they are first used, so that `import dmsc` and `dmsc
--help` stay quick.

cli.py, commands/, console/        the `dmsc` command line
authoring/                         a job before it is submitted: its code, its check
client/, follow/                   clients of the HTTP API; following a job to its end
launch/, process/, metrics/        meshes on this machine; services in one process
state/                             state folders, identities, credentials
tapping/, tracing/                 what a running mesh does: messages and spans
replay/, simulation/, chaos/       recorded runs, simulated meshes, injected faults
plots/                             plots
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dmsc.version import __version__

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.client.client import Client
    from dmsc.client.submitted_job import Job
    from policies import JobView, Policy
    from schemas.errors import DmscError
    from schemas.job import JobEvent, JobRecord, JobSpec, JobState


_homes = {
    "AsyncClient": "dmsc.client.async_client",
    "Client": "dmsc.client.client",
    "DmscError": "schemas.errors",
    "Job": "dmsc.client.submitted_job",
    "JobEvent": "schemas.job",
    "JobRecord": "schemas.job",
    "JobSpec": "schemas.job",
    "JobState": "schemas.job",
    "JobView": "policies",
    "Policy": "policies",
}

__all__ = [
    "AsyncClient",
    "Client",
    "DmscError",
    "Job",
    "JobEvent",
    "JobRecord",
    "JobSpec",
    "JobState",
    "JobView",
    "Policy",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _homes.get(name)
    if home is None:
        raise AttributeError(f"module 'dmsc' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
