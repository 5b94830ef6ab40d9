"""Secrets by name: what a job's URLs and its model's arguments need, and its record must not show.

A job names one as `secret://NAME`, or `secret://NAME/below/it`, wherever it has a URL, and for any text in
`model.args`; its record has the owner in it, `secret://USER/NAME/below/it`. Of a URL, the value is the whole
of it with its credentials:

    https://ruth:password@files.example/corpus      a user part
    https://host/corpus.txt?X-Signature=…           a query
    s3://bucket/runs#key=AKIA…&secret=…             behind `#`: options of the fsspec file system
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import Field

from schemas.base import Message, Part, Time, Token, is_token
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.redaction import names_secret

SCHEME = "secret://"
MOST_CHARACTERS = 8_192
MOST_GENERATED = 64
"""Of one job."""
DEEPEST = 32
"""Maps and lists within each other in a model's arguments."""
GENERATED = "generated-"
"""How the names begin of secrets that were taken out of a job's URLs: they go with the job."""
_reference = re.compile(
    r"^secret://(?P<user>[A-Za-z0-9_-]{1,120})/(?P<name>[A-Za-z0-9_-]{1,120})(?P<rest>/.*)?$"
)


class StoredSecret(Message, wire="secret.stored"):
    """In the bucket `secrets`, under `<user>.<name>`: sealed to the orchestrators
    (`bus.security.sealing`)."""

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

    value: str = Field(min_length=1, max_length=MOST_CHARACTERS, repr=False)


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
    texts: list[str] = [*urls_of(spec).values()]

    def note(place: str, key: str, text: str) -> str:
        texts.append(text)
        return text

    with_texts(spec.model.args, note)
    found = [split_reference(text) for text in texts]
    return {f"{one[0]}/{one[1]}": one[:2] for one in found if one is not None}


def taken_out(spec: JobSpec, user: str, fresh: Callable[[], str]) -> tuple[JobSpec, dict[str, str]]:
    """The job as it is recorded, and what was taken out of its URLs and arguments: new names → values.

    Credentials that stand in a URL, and arguments under a name that says token, password or the like, become
    secrets named by `fresh`; names get their owner.

    Raises:
        BadJob: another's secret, or not the name of one; too many, or too long ones.
    """
    made: dict[str, str] = {}

    def recorded(place: str, key: str, text: str) -> str:
        if text.startswith(SCHEME):
            return _owned(place, text, user)
        if not has_credentials(text) and not (text and names_secret(key)):
            return text
        if len(text) > MOST_CHARACTERS:
            raise BadJob(f"{place}: longer than {MOST_CHARACTERS:,} characters")
        if len(made) == MOST_GENERATED:
            raise BadJob(
                f"{place}: more than {MOST_GENERATED} secrets; `dmsc secret set` stores them by name"
            )
        name = fresh()
        made[name] = text
        return f"{SCHEME}{user}/{name}"

    urls = {place: recorded(place, "", url) for place, url in urls_of(spec).items()}
    args = with_texts(spec.model.args, recorded)
    if urls == urls_of(spec) and args == spec.model.args:
        return spec, made
    changed = {key: value for key, value in urls.items() if key != "data.source"}
    data = spec.data.model_copy(update={"source": urls["data.source"]})
    model = spec.model.model_copy(update={"args": args})
    return spec.model_copy(update={**changed, "data": data, "model": model}), made


def with_texts(args: dict[str, Any], change: Callable[[str, str, str], str]) -> dict[str, Any]:
    """A model's arguments with each text in them, at any depth, as `change(place, name, text)` has it; `name`
    is that of the argument or of the map's entry, of texts in a list the list's.

    Raises:
        BadJob: they are nested too deep.
    """

    def walked(place: str, key: str, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return change(place, key, value)
        if not isinstance(value, dict | list | tuple):
            return value
        if depth == DEEPEST:
            raise BadJob(f"{place}: nested more than {DEEPEST} deep")
        if isinstance(value, dict):
            return {one: walked(f"{place}.{one}", str(one), inner, depth + 1) for one, inner in value.items()}
        return type(value)(
            walked(f"{place}[{index}]", key, inner, depth + 1) for index, inner in enumerate(value)
        )

    found: dict[str, Any] = walked("model.args", "", args, 0)
    return found


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
