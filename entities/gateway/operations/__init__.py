"""The gateway's operations: what a client may ask of the mesh, the same over NATS and over HTTP.

Each operation is a value (`operation.py`): the action and the resource that the bearer of the token must be
permitted (Type 3), and what is done then: one command to the entity that carries it out, or a stream or
bucket of the bus is read.
The operations decide what a job may name (`job_urls.py`), how a repeated request gets its first answer
(`idempotency.py`), and when an entity that does not answer is left alone (`breaker.py`, `backends.py`).

`jobs.py` serves the NATS request API and holds the operations on jobs and nodes, which `job_view.py` keeps a
copy of, and whose curves `job_curves.py` folds; `modules.py`, `secrets.py`, `code.py`, `feeds.py`
and `access.py` hold those on modules, secrets, code, feeds and users; `access_client.py` asks Type 3.
The gateway's `service.py` and the routes in `http/routes/` call them.
No operation decides by itself who may do what, and none plans, places or changes a job.
"""
