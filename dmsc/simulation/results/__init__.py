"""The results of a simulation: runs it on several processes, computes the report, and shows it.

`dmsc simulate` and benchmarks call `parallel.simulate`. The result never depends on the number of processes.

parallel.py  runs a scenario on several cores
plot.py      throughput over time as SVG
present.py   the report as tables
report.py    the figures of a run
"""
