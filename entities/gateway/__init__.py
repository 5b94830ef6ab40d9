"""MG, microservice gateway: one per cluster (draft §3). `service.py` is the entity, `door.py` its HTTP."""

from __future__ import annotations

from entities.gateway.service import Gateway, GatewayConfig

__all__ = ["Gateway", "GatewayConfig"]
