"""A process's metrics for Prometheus: rendering them, and serving them at a port of their own.

`dmsc.process.serving` calls it in every process that runs services. The metrics themselves are defined in
`entities.metrics`; services only return readings. A failure here never stops a service.

exposition.py  renders the readings of all services of the process
listener.py    serves `GET /metrics` and `GET /healthz` without a web framework
"""
