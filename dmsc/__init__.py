"""DMSC: training of large models as microservices on a message bus.

The few names that a notebook, a user's own policy or a script imports. They are loaded when first
used, so that `import dmsc` (and `dmsc --help`) stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dmsc.version import __version__

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.client.client import Client
    from policies import JobView, Policy
    from schemas.errors import DmscError
    from schemas.job import JobEvent, JobRecord, JobSpec, JobState


_homes = {
    "AsyncClient": "dmsc.client.async_client",
    "Client": "dmsc.client.client",
    "DmscError": "schemas.errors",
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
