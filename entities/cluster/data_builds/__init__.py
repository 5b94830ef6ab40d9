"""Units of builds of data sets, on one node: a short-lived worker each, beside training (ADR-0065).

It decides nothing of a build: the orchestrator says which unit is done here, and takes the result. The agent
calls it. It never reads a source or a record itself: confined workers do.

unit_workers.py   `UnitWorkers`: accepts orders, runs workers, sends results until they are taken
"""
