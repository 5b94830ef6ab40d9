"""Plans on this machine, without a mesh: what a job would take on which slots, and what it would cost.

`dmsc plan` calls it. It decides which numbers of slots are tried for a deadline. It never asks a mesh and
starts no instance; the planning itself is `entities.planner`.

local_plans.py    plans of a job on slots that are named
plan_judge.py     a plan in the simulator; `python -m dmsc.planning` is the planning process with it
topology_file.py  the network between nodes, from a file
"""
