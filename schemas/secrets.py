"""Named secrets: values that a job's URLs and model arguments need, and that its record must not show.

A job names a secret as `secret://NAME`, or `secret://NAME/below/it`, in place of any URL and of any text in
`model.args`; its record also names the owner, `secret://USER/NAME/below/it`. The value for a URL is the whole
URL with its credentials:

    https://ruth:password@files.example/corpus      a user part
    https://host/corpus.txt?X-Signature=…           a query
    s3://bucket/runs#key=AKIA…&secret=…             after `#`: options of the fsspec file system
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import Field

from schemas.base import Message, Part, Time, Token, is_token
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.job_file.data import DataSpec, SourceSpec
from schemas.redaction import names_secret

SCHEME = "secret://"
MOST_CHARACTERS = 8_192
MOST_GENERATED = 64
"""Most generated secrets of one job."""
DEEPEST = 32
"""Deepest nesting of maps and lists in a model's arguments."""
GENERATED = "generated-"
"""Prefix of the names of secrets that were taken out of a job's URLs: they are removed with the job."""
_reference = re.compile(
    r"^secret://(?P<user>[A-Za-z0-9_-]{1,120})/(?P<name>[A-Za-z0-9_-]{1,120})(?P<rest>/.*)?$"
)


class StoredSecret(Message, wire="secret.stored"):
    """A secret in the bucket `secrets`, under `<user>.<name>`, sealed to the orchestrators.

    See `bus.security.sealing`.
    """

    user: Token
    name: Token
    sealed: str
    stored_at: Time


class SecretInfo(Part):
    """A secret without its value."""

    name: Token
    stored_at: Time


class SecretList(Part):
    """A user's own secrets, by name."""

    secrets: tuple[SecretInfo, ...] = ()


class SecretValue(Part):
    """Body of `PUT /v1/secrets/{name}`."""

    value: str = Field(min_length=1, max_length=MOST_CHARACTERS, repr=False)


def about(user: str, name: str) -> bytes:
    """The context that a sealed value is bound to."""
    return f"secret {user}/{name}".encode()


def split_reference(url: str) -> tuple[str, str, str] | None:
    """User, name and the rest of a record's `secret://USER/NAME/rest`; None for other URLs."""
    match = _reference.match(url)
    return None if match is None else (match["user"], match["name"], match["rest"] or "")


def has_credentials(url: str) -> bool:
    """Whether a user's URL has a user part, values in its query, or options after `#`."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme in ("bus", "secret", "dataset", "model"):
        return False
    return "@" in rest.partition("/")[0] or "=" in rest.partition("?")[2] or "=" in rest.partition("#")[2]


def urls_of(spec: JobSpec) -> dict[str, str]:
    """The URLs of a job, by their keys in the job file."""
    found = {
        **spec.data.urls(),
        "initial_weights": spec.weights_url,
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
    _data_with(spec.data, note)
    found = [split_reference(text) for text in texts]
    return {f"{one[0]}/{one[1]}": one[:2] for one in found if one is not None}


def secret_places(spec: JobSpec) -> list[str]:
    """Where a job file, as its user wrote it, names secrets or has some in URLs and arguments."""
    places: list[str] = []

    def note(place: str, key: str, text: str) -> str:
        if text.startswith(SCHEME) or has_credentials(text) or (text and names_secret(key)):
            places.append(place)
        return text

    for place, url in urls_of(spec).items():
        note(place, "", url)
    _data_with(spec.data, note)
    with_texts(spec.model.args, note)
    return list(dict.fromkeys(places))


class TakingOut:
    """Takes secrets out of a file's texts, one after the other. `made`: new names → values, so far."""

    def __init__(self, user: str, fresh: Callable[[], str]) -> None:
        self.made: dict[str, str] = {}
        self._user = user
        self._fresh = fresh
        self._names: dict[str, str] = {}  # by value: the parts of a mixture have it in common

    def recorded(self, place: str, key: str, text: str) -> str:
        """The text for the record. `place`: of the text in the file; `key`: the name that it stands under.

        Raises:
            BadJob: see `taken_out`.
        """
        if text.startswith(SCHEME):
            return _owned(place, text, self._user)
        if not has_credentials(text) and not (text and names_secret(key)):
            return text
        if text in self._names:
            return f"{SCHEME}{self._user}/{self._names[text]}"
        if len(text) > MOST_CHARACTERS:
            raise BadJob(f"{place}: longer than {MOST_CHARACTERS:,} characters")
        if len(self.made) == MOST_GENERATED:
            raise BadJob(
                f"{place}: more than {MOST_GENERATED} secrets; `dmsc secret set` stores them by name"
            )
        name = self._names[text] = self._fresh()
        self.made[name] = text
        return f"{SCHEME}{self._user}/{name}"


def taken_out(spec: JobSpec, user: str, fresh: Callable[[], str]) -> tuple[JobSpec, dict[str, str]]:
    """The job for its record, and the secrets taken out of its URLs and arguments: new names → values.

    Credentials in a URL, and arguments under a name that says token, password or the like, become secrets
    named by `fresh`. References get their owner's name.

    Raises:
        BadJob: a reference to another user's secret, an invalid name, or too many or too long secrets.
    """
    taking = TakingOut(user, fresh)
    made, recorded = taking.made, taking.recorded
    of_data = spec.data.urls()
    urls = {place: recorded(place, "", url) for place, url in urls_of(spec).items() if place not in of_data}
    data = _data_with(spec.data, recorded)
    args = with_texts(spec.model.args, recorded)
    if data == spec.data and args == spec.model.args and urls.items() <= urls_of(spec).items():
        return spec, made
    changed: dict[str, Any] = dict(urls)
    if spec.initial_weights is not None:
        url = urls["initial_weights"]
        changed["initial_weights"] = spec.initial_weights.model_copy(update={"url": url})
    model = spec.model.model_copy(update={"args": args})
    return spec.model_copy(update={**changed, "data": data, "model": model}), made


PartOfData = TypeVar("PartOfData", bound=SourceSpec)


def _data_with(data: DataSpec, change: Callable[[str, str, str], str]) -> DataSpec:
    """The section with each URL and each text in the arguments of its sources replaced by `change`.

    With a mixture that includes what the section itself says, which only its parts use.
    """

    def changed(place: str, part: PartOfData) -> PartOfData:
        changes = {field: change(f"{place}.{field}", "", url) for field, url in part.own_urls().items()}
        urls = {field: url for field, url in changes.items() if field in SourceSpec.model_fields}
        return part.model_copy(update={**urls, "args": with_texts(part.args, change, f"{place}.args")})

    mixture = tuple(changed(f"data.mixture[{index}]", part) for index, part in enumerate(data.mixture))
    sets = {name: changed(f"data.validation.{name}", part) for name, part in data.validation.items()}
    chain = []
    for index, function in enumerate(data.preprocess):
        at, tokenizer = f"data.preprocess[{index}]", function.tokenizer
        if tokenizer is not None:
            tokenizer = change(f"{at}.tokenizer", "", tokenizer)
        args = with_texts(function.args, change, f"{at}.args")
        chain.append(function.model_copy(update={"args": args, "tokenizer": tokenizer}))
    update = {"mixture": mixture, "validation": sets, "preprocess": tuple(chain)}
    return changed("data", data.model_copy(update=update))


def with_texts(
    args: dict[str, Any], change: Callable[[str, str, str], str], at: str = "model.args"
) -> dict[str, Any]:
    """Arguments of user code with each text in them, at any depth, replaced by `change(place, name, text)`.

    `name` is that of the argument or of the map's entry; for texts in a list it is the list's name.

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

    found: dict[str, Any] = walked(at, "", args, 0)
    return found


def _owned(place: str, url: str, user: str) -> str:
    name, slash, rest = url.removeprefix(SCHEME).partition("/")
    if name == user and is_token(rest.partition("/")[0]):  # as in a record
        return url
    if not is_token(name):
        raise BadJob(f"{place}: {SCHEME}NAME names a secret of yours; a name has letters, digits, - and _")
    return f"{SCHEME}{user}/{name}{slash}{rest}"


def below(value: str, rest: str) -> str:
    """The URL of `rest` below a secret's URL, followed by the secret's query and options."""
    if not rest:
        return value
    address, mark, query = value.partition("?")
    return f"{address.rstrip('/')}{rest}{mark}{query}"
