"""Which errors of a store pass by themselves, and how long a reader waits for that.

An error of the network or the store never says anything about a sample: it is retried until the store answers
or the limit is reached, and then the instance ends with `Unavailable`, which others may try again.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bus.logs import get_logger
from bus.wire.secret_urls import hidden
from schemas.errors import BadData, DmscError, Unavailable

log = get_logger("data")

T = TypeVar("T")

_FINAL = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP})
_PASSING_STATUS = frozenset({408, 425, 429})


class SourceChanged(BadData):
    """A file is no longer the one that was opened: other size, other ETag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRetryTimes:
    """How a reader waits for a store."""

    first_s: float = 0.2
    """The pause after the first error. It doubles with each further one."""
    longest_s: float = 10.0
    """The longest pause."""
    give_up_s: float = 300.0
    """How long one range may fail in a row. Longer survives longer outages; shorter reports them sooner."""


def passes(error: BaseException) -> bool:
    """Whether an error may be gone at the next attempt: all but a file that is missing or forbidden."""
    if isinstance(error, DmscError):
        return error.retryable
    status = http_status(error)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    if isinstance(error, OSError):
        return error.errno not in _FINAL
    return type(error).__module__.partition(".")[0] in ("aiohttp", "botocore", "httpx", "gcsfs", "urllib3")


def http_status(error: BaseException) -> int | None:
    """The HTTP status of an error of a library, if it has one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return _number(getattr(response, "status_code", None)) or _number(getattr(error, "status", None))


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def retried(
    call: Callable[[], T],
    what: str,
    times: StoreRetryTimes = StoreRetryTimes(),
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The result of `call`, which is repeated as long as its errors pass.

    Args:
        call: Reads something, and may be repeated.
        what: What it reads, for people; secrets in it are hidden.
        times: Pauses and limit.
        clock: Seconds of a steady clock.
        sleep: Waits for some seconds.

    Raises:
        BadData: it is missing or forbidden.
        Unavailable: it has failed for `give_up_s`.
    """
    began, pause_s, failures = clock(), times.first_s, 0
    while True:
        try:
            return call()
        except DmscError as error:
            if not error.retryable:
                raise
            failure: Exception = error
        except Exception as error:
            if not passes(error):
                raise BadData(f"{hidden(what)} can't be read: {reason(error)}") from error
            failure = error
        failures += 1
        waited_s = clock() - began
        if waited_s + pause_s > times.give_up_s:
            text = f"{hidden(what)} could not be read for {waited_s:.0f} s: {reason(failure)}"
            raise Unavailable(text) from failure
        if failures == 3:
            log.warning(
                "a store of data does not answer; trying on", source=hidden(what), why=reason(failure)
            )
        sleep(pause_s * (0.5 + random.random() / 2))
        pause_s = min(2 * pause_s, times.longest_s)


def reason(error: BaseException) -> str:
    """An error of a library in one line, without secrets."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError):
        return f"access is denied ({hidden(' '.join(str(error).split()))[:200]})"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return hidden(" ".join(text.split()))[:300]
