"""Model services: a version is a job whose instances answer requests; a service shares traffic among them.

The leader passes orders to `ModelServices`, which keeps each service's record; `JobRuns` drives a version as
a `VersionRun`. Nothing here sees a request: gateways take those, by the record and the registry.

model_services.py   orders, records by compare-and-set, and what becomes of versions while jobs come and go
service_rules.py    what an order makes of a record; pure
version_state.py    a version's state by its job's record and its instances' registrations; pure
version_run.py      the life of a version's job: deployed, adopted, parked, faults, its end
serving.py          its instances: replaced when lost, more and fewer, moved off nodes that are drained
"""
