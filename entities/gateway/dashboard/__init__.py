"""The dashboard that a gateway serves (docs/dashboard.md, ADR-0026): its files and the data that they show.

It decides what of the mesh a browser sees, how often, and what is left out when more comes than can be shown.
One set of subscriptions and one view model serve all viewers, and only while there are any.

`view_model.py`, `incidents.py`, `rows.py` and `service_rows.py` are the state, pure; `aggregator.py` feeds
it from the bus; `viewers.py` queues frames per browser; `logs.py` searches log lines; `tap_stream.py` is the
tap; `assets.py` holds the files; `services.py` is what the routes (`http/routes/dashboard.py`) and the
gateway's `service.py` use.
The dashboard changes nothing in the mesh, nothing ever waits for a viewer, and it shows no secret.
"""

from __future__ import annotations

from entities.gateway.dashboard.services import Dashboard

__all__ = ["Dashboard"]
