"""What lies in the world's streams and buckets: a marked value at each place, of both jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bus.messaging import rendezvous
from bus.subject_row import Subject
from bus.subjects import SUBJECTS
from bus.wire import codec
from schemas.envelope import EntityKind as K
from schemas.envelope import Sender
from schemas.job import JobRecord, JobSpec, JobState

COUNTED = b""
"""What is sent to a counter; the server keeps the sum."""
MARK = "canary<"
"""Followed by the subject on which it was stored and `>`: by that a leak is recognised."""
JOBS, ENDED_JOB, GOING_JOBS = "KV_jobs", "ended", ("j", "k")
JOB_RECORDS = tuple(f"$KV.jobs.{job}" for job in GOING_JOBS)


def mark(place: str) -> bytes:
    return f"{MARK}{place}>".encode()


# --- what is planted --------------------------------------------------------------------------------------
def places(patterns: Sequence[str]) -> list[str]:
    """Of a stream's patterns: subjects of job j and of job k, of own names and others'."""
    found = []
    for pattern in patterns:
        for own in (True, False):
            found.append(filled(pattern, own))
    return list(dict.fromkeys(found))


def filled(pattern: str, own: bool) -> str:
    """A concrete subject of a wildcard's: its open tokens name the attacker's, or others'."""
    row = next((row for row in SUBJECTS if row.wildcard() == pattern), None)
    if row is not None:
        return row(**tokens_of(row, own))
    job = "j" if own else "k"
    if pattern.startswith((f"{rendezvous.VALUES_SUBJECT}.", f"{rendezvous.COUNTERS_SUBJECT}.")):
        place = rendezvous.subjects_of(rendezvous.links_of(job))
        counter = pattern.startswith(f"{rendezvous.COUNTERS_SUBJECT}.")
        return place[1 if counter else 0].replace("*", "a2V5")
    if pattern.startswith("$KV."):
        bucket = pattern.split(".")[1]
        kept = next((row for row in SUBJECTS if row.bucket == bucket), None)
        if kept is not None:
            return kept(**tokens_of(kept, own))
    return pattern.replace(">", job).replace("*", job)


def tokens_of(row: Subject, own: bool) -> dict[str, str]:
    """Of job j and names of cluster a; or of job k and cluster b."""
    mine = {
        "job": "j",
        "sid": "j-s0-r0",
        "agent": "a-n",
        "gateway": "gateway-a",
        "cluster": "a",
        "module": "mine",
        "owner": "system",
    }
    theirs = {
        "job": "k",
        "sid": "k-s0-r0",
        "agent": "b-n",
        "gateway": "gateway-b",
        "cluster": "b",
        "module": "another",
        "owner": "researcher",
    }
    known = mine if own else theirs
    return {token: known.get(token, "x") for token in row.tokens}


def content(place: str) -> bytes:
    """The mark alone; a job's record, which others of us may read, has it in it. A counter takes none."""
    if place.startswith(rendezvous.COUNTERS_SUBJECT):
        return COUNTED
    if place in JOB_RECORDS:
        return job_record(place)
    return mark(place)


def job_record(place: str) -> bytes:
    record = record_of(place[-1], JobState.RUNNING, mark(place).decode())
    sender = Sender(name="orchestrator", kind=K.ORCHESTRATOR, incarnation="matrix")
    return codec.encode(record, codec.sender_map(sender), f"matrix-{place[-1]}")


def record_of(job: str, state: JobState, reason: str) -> JobRecord:
    spec = JobSpec.model_validate(
        {"name": "matrix", "model": {"factory": "workers.models.gpt:byte_gpt"}, "training": {"steps": 1}}
    )
    return JobRecord(
        job=job,
        spec=spec,
        state=state,
        user="somebody",
        reason=reason,
        submitted_at=time.time(),
        changed_at=time.time(),
    )
