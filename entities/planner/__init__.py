"""The planner: where a model is cut, which instances work for which stage, where they run (draft §3, §4.5).

It decides, from what a request says (layers in the order in which the model computes them, free slots with
speed and memory, and what lies between them): into how many stages that order is cut and where, how many
instances each stage has and in which slots, and what a step of that is forecast to take. The orchestrator
asks. Deciding is pure: no clock, and searches end by counts, so the same request gives the same plan. It
never changes the order of layers, never starts an instance, and reads no record.

plan_request.py      what is asked and answered, as JSON between processes; `NoPlan`
plan_at_once.py      the plan of a small job, or one to fall back on, for the leader's loop
planning_process.py  asks a process of its own, which `search/` is for
abandoned_work.py    ends a plan for which nobody waits any more
first_placement.py   a slot for each unit, spread, within memory
windows.py           how many microbatches are held and open
network_topology.py  which links lie between hosts, from a file or as measured
layer_rules.py       what users say of layers; which of it contradicts what
constraints.py       what that says of instances: spread, together, apart, pin
"""
