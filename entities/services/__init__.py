"""Decisions about a served model's versions that orchestrator and gateways share (pure).

They decide which version answers a request, when a version goes back at once, and what several answers amount
to. The orchestrator (`traffic`, `hard_rule`) and the gateways (`traffic`, `aggregation`) call them. They
never deploy, route or answer anything, and know neither clock nor bus.

- `traffic`: weights of 10,000, sticky by key (ADR-0135)
- `hard_rule`: a candidate that fails its first requests (ADR-0134)
- `aggregation`: `first`, `vote`, `weighted`, `attention` (ADR-0136)
"""
