"""The checkpoint that a job names in `resume_from`: where it is, and in which class of bits it was computed.

Nodes read it. It may be of another job, which had other slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from entities.job_files.checkpoint_catalog import Opener, checkpoints_at, read_manifest
from entities.job_files.node_files import files_of
from entities.orchestrator.job_state.job_secrets import secrets_for
from entities.orchestrator.job_state.retry_limits import Unrecoverable
from schemas.errors import BadInput, DamagedCheckpoint
from schemas.job import JobSpec

Agents = Callable[[], Mapping[str, str]]
"""The agents of all nodes, each with the key to which its secrets are sealed."""


async def named_checkpoints(bus: Bus, spec: JobSpec, named: str, agents: Agents) -> tuple[list[str], Opener]:
    """The URLs of the checkpoints there, the newest first, and what opens them.

    Raises:
        Unrecoverable: there are none.
        Unavailable: no node could look.
    """
    try:
        secrets = await secrets_for(bus, spec)

        def open_url(url: str) -> ReadableArtifacts:
            return files_of(url, bus, agents, secrets=secrets)

        urls = await checkpoints_at(open_url, named)
    except BadInput as error:
        raise Unrecoverable(f"resume_from {named}: {error.text}") from None
    if not urls:
        raise Unrecoverable(
            f"resume_from {named}: there is no manifest.json of a checkpoint; "
            "name the folder of one, or the folder 'checkpoints' of a job"
        )
    return urls, open_url


async def class_of_named(bus: Bus, spec: JobSpec, named: str, agents: Agents) -> str:
    """The class of bits of the newest checkpoint there that can be read; empty: it names none.

    Raises:
        Unrecoverable: there is no checkpoint.
        Unavailable: no node could look.
    """
    urls, open_url = await named_checkpoints(bus, spec, named, agents)
    for url in urls:
        try:
            return (await read_manifest(open_url, url)).bits_class
        except DamagedCheckpoint:
            continue  # the restore says so, and tries the one before
    return ""
