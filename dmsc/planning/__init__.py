"""What a job would take on which slots, and what it would cost: on this machine, or on a mesh.

`dmsc plan` calls it. It decides which numbers of slots are tried for a deadline. It starts no instance; the
planning itself is `entities.planner`, here or at the mesh's orchestrator.

local_plans.py    plans of a job on slots that are named
mesh_plans.py     plans on the slots of a mesh, by its gateway
plan_text.py      a plan's row and lines
kept_plan.py      a job file with its plan in it
plan_judge.py     a plan in the simulator; `python -m dmsc.planning` is the planning process with it
topology_file.py  the network between nodes, from a file
"""
