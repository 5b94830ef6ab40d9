"""Models for networks and operations at large, beside the policies that DMSC runs.

The benchmarks and plots of `make bench-policies` use them, and one policy of a mesh, `port_faults`. They are
pure functions of arrays and files, and never use the bus.

- `split_learning`: splits of demands learnt from past traffic, and their trust.
- `topology_file`: networks from GraphML files, with drawn traffic.
- `topology_plot`: draws how full their links are (`dmsc policy plot routes`).
- `fault_signatures`: which port of a fabric is at fault, learnt from recordings.
- `port_faults`: the policy `port-faults`, which feeds it what a fabric's monitoring posts.
- `repair_outlook`: whether a repair will take longer than a limit.
- `logistic`: the logistic regression of both.
"""
