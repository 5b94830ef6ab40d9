"""The planner: where a model is cut, which instances work for which stage, where they run (draft §3, §4.5).

It decides a plan from what a request says: layers with their costs, free slots with speed and memory, and
what lies between them. The orchestrator asks. All of it is pure: no clock, no I/O. Searches end by
counts, so the same request gives the same plan. It never starts an instance and reads no record.

plan_request.py         what is asked and answered, as JSON between processes; `NoPlan`
plan_at_once.py         the plan of a small job, or one to fall back on, for the leader's loop
first_placement.py      a slot for each unit, spread, within memory
windows.py              how many microbatches are held and open
constraints.py          spread, together, apart, pin; which of them contradict each other
plan_search.py          the search for the best plan, its alternatives, and what stands against one
step_cost.py            what a step takes; the best cut for given instances
instance_assignment.py  which instances work for which stage: tabu over counts
chain_cut.py            the exact cut of a chain
graph_cut.py            that of a graph with branches
contraction.py          ties and cycles as one layer; layer_graph.py: what is cut
network_topology.py     what lies between hosts
link_placement.py       places where the busiest link is least busy

From `plan_search.py` on the modules import numpy: they run in a process of their own.
"""
