"""Server-sent events of the HTTP API: jobs' events and the fault queue, streamed to many clients (ADR-0025).

It decides what a record looks like to a client (`format.py`), how many clients share one consumer of the bus
(`hub.py`), and when a client's stream ends (`response.py`): behind a last record, when the client lags, when
its permission ends, or when the gateway stops.

`http/routes/jobs.py`, `faults.py` and `dashboard.py` make streams, through `HttpContext.stream`.
A stream never waits for a slow client, and never skips a record without saying so: a client that falls behind
is disconnected with `lagged`, and continues with `Last-Event-ID`.
"""
