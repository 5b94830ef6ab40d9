"""Experimental models for traffic engineering, beside the policies that DMSC runs.

The benchmarks and plots of `make bench-policies` use them; no policy of a mesh does. They are pure functions
of arrays and files, and never use the bus.

- `split_learning`: splits of demands learnt from past traffic, and their trust.
- `topology_file`: networks from GraphML files, with drawn traffic.
- `repair_outlook`: whether a repair will take longer than a limit.
"""
