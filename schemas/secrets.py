"""Secrets by name: what a job's URLs need and its record must not show.

A job names one as `secret://NAME`, or `secret://NAME/below/it`, wherever it has a URL; its record has the
owner in it, `secret://USER/NAME/below/it`. The value is the whole URL with its credentials:

    https://ruth:password@files.example/corpus      a user part
    https://host/corpus.txt?X-Signature=…           a query
    s3://bucket/runs#key=AKIA…&secret=…             behind `#`: options of the fsspec file system
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import Field

from schemas.base import Message, Part, Time, Token, is_token
from schemas.errors import BadJob
from schemas.job import JobSpec

SCHEME = "secret://"
MOST_CHARACTERS = 8_192
GENERATED = "generated-"
"""How the names begin of secrets that were taken out of a job's URLs: they go with the job."""
_reference = re.compile(
    r"^secret://(?P<user>[A-Za-z0-9_-]{1,120})/(?P<name>[A-Za-z0-9_-]{1,120})(?P<rest>/.*)?$"
)


class StoredSecret(Message, wire="secret.stored"):
    """In the bucket `secrets`, under `<user>.<name>`: sealed to the orchestrators (`bus.sealing`)."""

    user: Token
    name: Token
    sealed: str
    stored_at: Time


class SecretInfo(Part):
    """What is told of a secret: all but its value."""

    name: Token
    stored_at: Time


class SecretList(Part):
    """A user's own secrets, by name."""

    secrets: tuple[SecretInfo, ...] = ()


class SecretValue(Part):
    """Body of `PUT /v1/secrets/{name}`."""

    # the pattern is for readers of the document: a value that does not fit stands in no message
    value: str = Field(
        min_length=1,
        max_length=MOST_CHARACTERS,
        repr=False,
        json_schema_extra={"pattern": r"^[A-Za-z][A-Za-z0-9+.-]*://."},
    )


def about(user: str, name: str) -> bytes:
    """Where a sealed value stands."""
    return f"secret {user}/{name}".encode()


def split_reference(url: str) -> tuple[str, str, str] | None:
    """User, name and the rest of a record's `secret://USER/NAME/rest`; None for other URLs."""
    match = _reference.match(url)
    return None if match is None else (match["user"], match["name"], match["rest"] or "")


def has_credentials(url: str) -> bool:
    """Whether a URL that somebody wrote has a user part, a query's values, or options behind `#`."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme in ("bus", "secret"):
        return False
    return "@" in rest.partition("/")[0] or "=" in rest.partition("?")[2] or "=" in rest.partition("#")[2]


def urls_of(spec: JobSpec) -> dict[str, str]:
    """The URLs of a job, by their places."""
    found = {
        "data.source": spec.data.source,
        "initial_weights": spec.initial_weights,
        "resume_from": spec.resume_from,
        "artifacts": spec.artifacts,
    }
    return {place: url for place, url in found.items() if url is not None}


def references_of(spec: JobSpec) -> dict[str, tuple[str, str]]:
    """`USER/NAME` → user and name of each secret that a job names."""
    found = [split_reference(url) for url in urls_of(spec).values()]
    return {f"{one[0]}/{one[1]}": one[:2] for one in found if one is not None}


def taken_out(spec: JobSpec, user: str, fresh: Callable[[], str]) -> tuple[JobSpec, dict[str, str]]:
    """The job as it is recorded, and what was taken out of its URLs: new names → values.

    Credentials that stand in a URL become a secret named by `fresh`; names get their owner.

    Raises:
        BadJob: another's secret, or not the name of one.
    """
    made: dict[str, str] = {}
    urls = urls_of(spec)
    for place, url in urls.items():
        if url.startswith(SCHEME):
            urls[place] = _owned(place, url, user)
        elif has_credentials(url):
            if len(url) > MOST_CHARACTERS:
                raise BadJob(f"{place}: longer than {MOST_CHARACTERS:,} characters")
            name = fresh()
            made[name] = url
            urls[place] = f"{SCHEME}{user}/{name}"
    if urls == urls_of(spec):
        return spec, made
    changed = {key: value for key, value in urls.items() if key != "data.source"}
    data = spec.data.model_copy(update={"source": urls["data.source"]})
    return spec.model_copy(update={**changed, "data": data}), made


def _owned(place: str, url: str, user: str) -> str:
    name, slash, rest = url.removeprefix(SCHEME).partition("/")
    if name == user and is_token(rest.partition("/")[0]):  # as a record has it
        return url
    if not is_token(name):
        raise BadJob(f"{place}: {SCHEME}NAME names a secret of yours; a name has letters, digits, - and _")
    return f"{SCHEME}{user}/{name}{slash}{rest}"


def below(value: str, rest: str) -> str:
    """The URL of what lies below a secret's, its query and options behind it."""
    if not rest:
        return value
    address, mark, query = value.partition("?")
    return f"{address.rstrip('/')}{rest}{mark}{query}"
