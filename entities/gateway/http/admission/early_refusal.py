"""Refusals under overload that are sent before the request is parsed, because parsing costs too much then.

Parsing a request's head, making a task and passing through the application takes a good part of a
millisecond, whatever the answer. Under overload (`HttpLoad.too_much`) a complete GET on an idle connection
gets a ready-made `503` with `Retry-After`, and the connection stays open. All other requests go to
`RequestAdmission`, which refuses them once they are parsed. Probes are always answered.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from entities.gateway.http.admission.load import HttpLoad
from entities.gateway.http.problems import MEDIA_TYPE, problem
from schemas.errors import Overloaded

PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that are answered even under overload, because they report on the gateway's state."""
BUSY = "more requests come than this gateway can do; come back in a second"
_BODY = json.dumps(problem(HTTPStatus.SERVICE_UNAVAILABLE, BUSY, Overloaded.code, retryable=True)).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: %s\r\ncontent-length: %d\r\nretry-after: 1\r\n\r\n%s"
    % (MEDIA_TYPE.encode(), len(_BODY), _BODY)
)
_PROBE = tuple(f"GET {path} ".encode() for path in PROBES)
_MORE = re.compile(
    rb"\r\n(?:content-length:(?! *0\r)|transfer-encoding:|expect:|upgrade:|connection: *close)", re.I
)


def is_plain(data: bytes) -> bool:
    """Whether `data` is exactly one complete HTTP/1.1 GET without a body, on a connection that stays open.

    Everything else is left to the parser.
    """
    if not data.startswith(b"GET /") or data.find(b"\r\n\r\n") != len(data) - 4:
        return False
    if data.count(b"\n") != data.count(b"\r\n"):  # a parser may take a bare \n for the end of a line
        return False
    return data[: data.find(b"\r\n")].endswith(b" HTTP/1.1") and _MORE.search(data) is None


def refusing_early(
    protocol: type[Any], load: HttpLoad, refused: Callable[[], None]
) -> type[asyncio.Protocol]:
    """A subclass of `protocol` (from `with_deadlines`) that checks `load` first.

    It calls `refused` once per refusal.
    """

    class Early(protocol):  # type: ignore[misc]  # whichever parser there is
        is_plain_so_far = True  # only complete plain requests came, so the parser holds no rest of one

        def data_received(self, data: bytes) -> None:
            plain = self.is_plain_so_far = self.is_plain_so_far and is_plain(data)
            if plain:
                reason = load.too_much(self.loop.time())
                if reason and self._is_idle() and not data.startswith(_PROBE):
                    self._refuse(reason)
                    return
                load.comes()
            super().data_received(data)

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _refuse(self, reason: str) -> None:
            if self.flow.write_paused:  # the client sends without reading its answers
                self.transport.abort()
                return
            load.shed(reason, self.loop.time())
            refused()
            self.transport.write(REFUSAL)
            self.answered()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return Early
