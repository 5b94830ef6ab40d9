"""What the URLs of a job may be, before it becomes one: one line with the key where one may not."""

from __future__ import annotations

from bus.artifacts import SCHEME, refusal
from schemas.errors import BadJob
from schemas.job import JobSpec


def refuse_urls(spec: JobSpec) -> None:
    """Nothing is opened: whoever does that, on a node, looks again at what a name stands for.

    Raises:
        BadJob: it names what jobs may not name.
    """
    for key, url, write in (
        ("data.source", spec.data.source, False),
        ("initial_weights", spec.initial_weights, False),
        ("resume_from", spec.resume_from, False),
        ("artifacts", spec.artifacts, True),
    ):
        if url and (reason := refusal(url, write=write)):
            raise BadJob(f"{key}: {reason}")


def jobs_named(spec: JobSpec) -> tuple[str, ...]:
    """Jobs whose weights or checkpoints it begins with: its user has to be let read them."""
    prefix = f"{SCHEME}artifacts/"
    begins = [url for url in (spec.initial_weights, spec.resume_from) if url and url.startswith(prefix)]
    named = (url.removeprefix(prefix).partition("/")[0] for url in begins)
    return tuple(job for job in named if job)
