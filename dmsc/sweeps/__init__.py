"""Sweeps: one job file, some keys with several values, and as many jobs of the mesh's queue.

It decides which trials a sweep file stands for (`sweep_file.py`, `trials.py`), what is submitted, parked,
resumed or cancelled next (`schedule.py`, pure), and which trial is best (`results.py`). `driver.py` reads the
trials' records and curves from a gateway and carries the decisions out, under the rights of its user.

A sweep has no store of its own: its jobs' names say which trials they are, and all else follows from the
file, the records and the curves, so it goes on after any death (ADR-0052). `dmsc sweep` calls it.
"""
