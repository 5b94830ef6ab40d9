"""MG, microservice gateway: one per cluster, the entry of its cluster for clients and for data (draft §3).

It decides which data instance produces which microbatch (`dispatch/`), and which requests it admits: over
NATS (`operations/`) and, where a port is set, over HTTP (`http/`). It also accounts for what users store on
the bus (`storage/`) and shows the mesh to browsers (`dashboard/`). `service.py` is the entity: it subscribes,
registers and wires these parts together.

Callers: clients (`dmsc.Client`, the CLI, any HTTP client), and the orchestrator with a step's microbatches.
`dmsc/process/composition.py` starts it.
The gateway never decides what a user may do (the authorizer does, Type 3), never plans or places a job (the
orchestrator does), and no tensor ever passes through it (ADR-0003).
"""

from __future__ import annotations

from entities.gateway.service import Gateway, GatewayConfig

__all__ = ["Gateway", "GatewayConfig"]
