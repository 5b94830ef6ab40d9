"""The policies that come with DMSC (docs/policies-built-in.md): each is one class derived from `Policy`.

Each decides one thing: weights by service time or by trial, moves between stages, links that will be slow,
broken paths, failing devices, waiting or replacing, checkpoint intervals. `dmsc policy run NAME` hosts one
(`policies.module`). They suggest; the orchestrator decides (ADR-0002). They do no I/O.
"""
