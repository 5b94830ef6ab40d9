"""Batches: requests of a file, answered unit by unit beside interactive ones (ADR-0155, ADR-0156).

Called by the HTTP routes below `http/routes/openai`, and run by the gateway's service. It decides which
gateway works on a batch, when a request of one may begin, and what its answer is; a unit's row is created
once, so whoever dies, each request has one answer. It never answers anything itself (`entities.gateway.calls`
does), and keeps nothing that is not on the bus.

batch_lines.py    pure: a file's lines as units of requests, and answers as lines
batch_rules.py    pure: who works on a batch, what it is in OpenAI's shape
file_store.py     users' files: stored, listed, read, deleted
batch_log.py      rows of batches and units, by compare-and-set
shared_read.py    one read of a bucket for all who ask at the same time
batch_runner.py   works on this gateway's batches, and takes over those of gateways that are gone
unit_work.py      the requests of one unit, answered
operations.py     what the routes call
"""
