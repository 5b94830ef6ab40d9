"""Cordons and drains: nodes and slots that are to get no new instances, or are to be emptied.

Operators order them through the gateway; a device that reports errors is drained by itself, and so is a node
whose machine goes away (ADR-0170). The leader calls `CordonService` for orders and runs `Draining` as a task.
A cordon stands in the bucket `cordons`, so a new orchestrator goes on with it. Nothing is moved that would
find no slot elsewhere, unless its machine goes away.

cordon_service.py  `CordonService`: sets and lifts cordons, and keeps them in the bucket
draining.py        `Draining`: moves instances away, one at a time, or all of a node that leaves
"""
