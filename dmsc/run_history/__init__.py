"""Runs side by side: which there are, where each came from, what it cost, and how they differ.

It decides which jobs a list names (`selection.py`), which job another one began from (`lineage.py`), which
keys of two job files differ (`config_differences.py`), at which steps figures are compared and which is best
(`comparison.py`), and what is told of one run (`run_report.py`). All of it is pure, over job records and
curves that the caller has fetched from a gateway under its own rights.

`dmsc/commands/jobs/runs.py` calls it, and so do sweeps. It starts, changes and stores nothing.
"""
