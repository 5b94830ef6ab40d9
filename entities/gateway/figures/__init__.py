"""What this gateway has answered for each version of a service: counted, told on the bus and to `/metrics`.

It decides what of a request is counted and when that is said; it sees when a session begins, gets its first
token and ends, and never what was asked. The gateway's `service.py` puts it beside the sessions
(`generation/session_keeper.py`). Dashboards and the orchestrator's own loop hear it (ADR-0161).

service_counter.py      counts of versions, from sessions and predictions
figures_publisher.py    says what changed, once a second; and the same figures for `/metrics`
"""
