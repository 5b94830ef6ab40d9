"""The client's side of a gateway's HTTP API: headers, errors, stream positions, files. No network I/O."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, TypeVar

import httpx

from bus.nats import tls_trust
from dmsc.version import __version__
from schemas.base import Message
from schemas.errors import (
    BadInput,
    BadMessage,
    DmscError,
    ErrorReply,
    InProgress,
    NotFound,
    Overloaded,
    RateLimited,
    Refused,
    Unavailable,
)
from schemas.job import JobSpec, WeightsManifest
from schemas.weights_digest import INDEX_NAME, weights_index

M = TypeVar("M", bound=Message)

STREAM_TIMEOUT = httpx.Timeout(10.0, read=40.0)
"""Timeouts of streams: a gateway sends a comment at least every 15 s, so after 40 s of silence the connection
is dead."""


ENDINGS = ("lagged", "closing", "refused")
"""Events with which a gateway ends a stream that can be resumed, at the same or another gateway. After
`refused`, the next request returns the reason."""

ENDING_LINES = tuple(f"event: {name}" for name in ENDINGS)


DONE = "[DONE]"
"""The data of the last event of an answer that is whole."""


class Position(TypedDict):
    """The start of an event stream, as parameters and headers of a request."""

    params: dict[str, str]
    headers: dict[str, str]


def headers(token: str | None) -> dict[str, str]:
    common = {"User-Agent": f"dmsc/{__version__}"}
    return common | ({"Authorization": f"Bearer {token}"} if token else {})


def verify(urls: Sequence[str]) -> ssl.SSLContext | bool:
    """How gateways' certificates are verified. Raises `BadInput` if the CA's file can't be used."""
    if any(url.startswith("https://") for url in urls):
        return tls_trust.context()
    return True


def timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, 5.0))


def as_spec(job: str | Path | Mapping[str, Any] | JobSpec) -> dict[str, Any]:
    """The JSON body of a submission. Raises `BadJob` with one line per problem."""
    from pydantic import ValidationError

    from dmsc.client.job_file import load_job
    from schemas.errors import BadJob
    from schemas.explain import explain

    if isinstance(job, str | Path):
        job = load_job(Path(job))
    if not isinstance(job, JobSpec):
        try:
            job = JobSpec.model_validate(job)
        except ValidationError as error:
            raise BadJob("\n".join(explain(error, JobSpec))) from error
    return job.model_dump(mode="json")


def raise_for(response: httpx.Response) -> None:
    """Raise the exception that an error answer stands for. The body must have been read."""
    if not response.is_error:
        return
    status = response.status_code
    fields: dict[str, Any] = {}
    try:
        problem: dict[str, Any] = response.json()
        own = problem.get("error")  # on the paths of OpenAI's API
        if isinstance(own, dict):
            problem = {"detail": own.get("message"), "code": own.get("code")}
        text = str(problem.get("detail") or problem.get("title") or response.reason_phrase)
        text = "\n".join(problem.get("problems") or [text])
        code = problem.get("code")
        fields |= {"waiting": problem["waiting"]} if isinstance(problem.get("waiting"), dict) else {}
    except (ValueError, AttributeError):
        text, code = f"{response.url} answered {status} {response.reason_phrase}", None
    fields |= {"retry_after_s": wait_s(response)} if "retry-after" in response.headers else {}
    reported = ErrorReply(code=code, text=text).to_exception() if isinstance(code, str) else None
    if reported is not None and (type(reported) is not DmscError or code == DmscError.code):
        reported.fields.update(fields)
        raise reported
    raise _by_status(status)(text, **fields)


def wait_s(response: httpx.Response) -> float:
    """The `Retry-After` header in seconds."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 1.0


def _by_status(status: int) -> type[DmscError]:
    if status in (401, 403):
        return Refused
    if status == 404:
        return NotFound
    if status == 429:
        return RateLimited
    if status in (502, 503, 504):
        return Unavailable
    return BadInput if status < 500 else DmscError


def unreachable(urls: list[str], error: Exception) -> DmscError:
    """The error to raise if no gateway answers, in one line."""
    if isinstance(error, DmscError):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if tls_trust.is_distrust(cause):
            return Refused(tls_trust.distrusted(f"the gateway at {', '.join(urls)}", cause))
        cause = cause.__cause__ or cause.__context__
    reason = str(error) or type(error).__name__
    return Unavailable(
        f"no gateway answers at {', '.join(urls)} ({reason}); is the mesh up? `dmsc status`, `dmsc doctor`"
    )


def may_repeat(method: str, keyed: bool, error: Exception) -> bool:
    """Whether a request that failed like this may be repeated, because it can't take effect twice.

    Any request may be repeated if it was refused before it began, or if no connection was made. A read, or a
    request with an idempotency key, may be repeated after any transient error.
    """
    not_begun = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | Overloaded)
    transient = isinstance(error, httpx.TransportError | Unavailable | InProgress)
    return not_begun or ((method == "GET" or keyed) and transient)


def position(last: int) -> Position:
    """The position after stream sequence `last`."""
    return Position(params={"start": str(last + 1)}, headers={"Last-Event-ID": str(last)} if last > 0 else {})


def next_record(parser: EventParser, line: str, last: int, kind: type[M]) -> tuple[int, M] | None:
    """Parse one more line; return (sequence, record) if a record newer than `last` is complete."""
    server_event = parser.feed(line)
    if server_event is None or server_event.event in ENDINGS:
        return None
    if server_event.event == "error":
        problem = json.loads(server_event.data)
        raise ErrorReply(
            code=str(problem.get("code", "internal")), text=str(problem.get("detail", ""))
        ).to_exception()
    try:
        sequence = int(server_event.id)
        event = kind.model_validate_json(server_event.data)
    except ValueError as error:
        raise BadMessage(
            f"the gateway sent an event that this version can't read: {server_event.data[:120]}"
        ) from error
    return (sequence, event) if sequence > last else None


def next_piece(parser: EventParser, line: str) -> ServerEvent | None:
    """Parse one more line of an answer's stream; return its event if it is complete.

    Raises the error that ends the answer, if the event is one.
    """
    event = parser.feed(line)
    if event is None or event.event in ENDINGS:
        return None
    if event.data.startswith('{"error"'):
        error = json.loads(event.data)["error"]
        code, text = str(error.get("code") or DmscError.code), str(error.get("message", ""))
        raise ErrorReply(code=code, text=text).to_exception()
    return event


def shards(manifest: WeightsManifest) -> list[str]:
    """The names of the files with tensors, without the index, which the client writes itself."""
    return [shard for shard in manifest.shards if shard != INDEX_NAME]


def shard_path(folder: Path, shard: str) -> Path:
    """The path of a shard in the folder. Raises `BadMessage` for a name that would leave the folder."""
    if Path(shard).name != shard or shard in ("", ".", ".."):
        raise BadMessage(f"the gateway names a shard {shard!r} that is not a plain file name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / shard


def file_below(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file below the folder; its parent is made.

    Raises `BadMessage` for a name that would leave the folder.
    """
    parts = name.split("/")
    if "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise BadMessage(f"the gateway names a file {name!r} that does not lie below its folder")
    target = folder.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextmanager
def partial_file(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `target`, and rename it to `target` when the block ends without error."""
    partial = target.with_name(f".{target.name}.{time.monotonic_ns():x}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_index(folder: Path, manifest: WeightsManifest) -> Path:
    """Write `model.safetensors.index.json` as Hugging Face loaders expect it."""
    index = weights_index(manifest.tensors, manifest.bytes, manifest.names)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INDEX_NAME
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return path


# --- server-sent events ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `id` is the stream's last id so far, as text."""

    id: str
    event: str
    data: str


class EventParser:
    """Takes the lines of a stream one by one, and returns an event when it is complete."""

    def __init__(self) -> None:
        self.last_id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, line: str) -> ServerEvent | None:
        """Take one line without its line end.

        A blank line completes an event. Comments, which begin with `:`, only keep the connection alive.
        """
        if not line:
            return self._complete()
        if line.startswith(":"):
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id" and "\0" not in value:
            self.last_id = value
        elif field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)
        return None

    def _complete(self) -> ServerEvent | None:
        data, event = self._data, self._event or "message"
        self._data, self._event = [], ""
        return ServerEvent(self.last_id, event, "\n".join(data)) if data else None
