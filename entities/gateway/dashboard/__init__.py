"""The dashboard, served by a gateway (docs/dashboard.md, ADR-0026): assets, one aggregated view, live events.

`picture.py` is the state, pure; `feed.py` listens for all viewers at once; `routes.py` is the HTTP.
"""

from __future__ import annotations

from entities.gateway.dashboard.services import Dashboard

__all__ = ["Dashboard"]
