"""The gateway's operations: what a client may ask of the mesh, the same over NATS and over HTTP.

Each operation first asks the authorizer (Type 3) whether the bearer of the token may do it. It then sends one
command to the entity that carries it out, or reads a stream or bucket of the bus.
The operations decide what a job may name (`job_urls.py`), how a repeated request gets its first answer
(`idempotency.py`), and when an entity that does not answer is left alone (`breaker.py`, `backends.py`).

`jobs.py` serves the NATS request API and holds the operations on jobs and nodes; `modules.py`, `secrets.py`
and `access.py` hold those on modules, secrets and users; `access_client.py` asks Type 3.
The gateway's `service.py` and the routes in `http/routes/` call them.
No operation decides by itself who may do what, and none plans, places or changes a job.
"""
