"""Limits of the HTTP API, in a module of their own: code that only configures them loads no framework."""

from __future__ import annotations

from dataclasses import dataclass, field

from entities.gateway.http.rate_limit import RequestRate
from entities.gateway.http.sse.format import EventsConfig
from entities.http_server.connection_limits import ConnectionBounds
from schemas.feeds import PUSH_BYTES
from schemas.job_file.code import ARCHIVE_BYTES
from schemas.usage import Prices

USUAL_RATE = RequestRate(per_s=200.0, burst=400)
UNKNOWN_RATE = RequestRate(per_s=20.0, burst=60)


@dataclass(frozen=True, kw_only=True)
class HttpConfig(ConnectionBounds):
    """Limits of the HTTP API."""

    max_job_bytes: int = 1 << 20  # of a JSON body; the bus takes no larger message either
    max_dataset_bytes: int = 4 << 30  # of one data set, streamed into the bus's object store
    max_code_bytes: int = ARCHIVE_BYTES  # of one archive of code; nodes take no larger one
    max_file_bytes: int = 200 << 20  # of one file of requests for a batch, as OpenAI has it
    max_push_bytes: int = PUSH_BYTES  # of one push to a feed, whose records are checked one by one
    rate: RequestRate = USUAL_RATE  # of one identity: a user, else an address
    unknown_rate: RequestRate = UNKNOWN_RATE  # of an address, without a token that was accepted before
    open_requests: int = 256  # requests being answered; beyond it 503. Streams, files, and what a service is
    # asked are counted apart: they wait for others
    queued_requests: int = 256  # requests that wait for their turn; beyond it 503
    burst_s: float = 0.5  # how long the first request in the queue may have waited; beyond it 503
    standing_s: float = 0.05  # the same, once the queue has not been empty for burst_s
    shed_log_every_s: float = 1.0  # between two log lines about refusals under overload
    upload_hold_s: float = 30.0  # how long a data set's reservation outlives a gateway that fell silent
    stalled_each: int = 64  # bodies of one identity that wait for the client's bytes; beyond it 429
    body_bytes_each: int = 64 << 20  # of bodies of one identity's requests, in memory; beyond it 429
    body_bytes: int = 512 << 20  # of all bodies in memory; beyond it 503
    charge_bytes: int = 256 << 10  # a body in memory is charged as one request for each such part of it
    downloads_each: int = 64  # files that one identity reads at a time; beyond it 429
    drain_s: float = 5.0  # at shutdown, for requests that are being answered
    events: EventsConfig = field(default_factory=EventsConfig)
    prices: Prices = field(
        default_factory=Prices
    )  # of this mesh; `dmsc runs` and the dashboard multiply with them

    def __post_init__(self) -> None:
        ConnectionBounds.__post_init__(self)
        if min(self.open_requests, self.queued_requests) < 1:
            raise ValueError("open_requests and queued_requests must be at least 1")
        if not 0 < self.standing_s <= self.burst_s:
            raise ValueError("standing_s must be above 0, and not above burst_s")
        if self.stalled_each < 1 or self.upload_hold_s <= 0:
            raise ValueError("stalled_each and upload_hold_s must be above 0")
        if min(self.charge_bytes, self.downloads_each) < 1:
            raise ValueError("charge_bytes and downloads_each must be at least 1")
        if not 0 < self.body_bytes_each <= self.body_bytes:
            raise ValueError("body_bytes_each must be above 0, and not above body_bytes")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be below 0")
