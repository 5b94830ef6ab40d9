"""The search for a plan: what needs numpy, and runs in the planning process (`python -m entities.planner`).

It decides how a request is answered best. `entities.planner.__main__` calls it, benchmarks and tests too;
nothing that serves anybody imports it.

plan_search.py          the search for the best plan, its alternatives, and what stands against one
plan_places.py          the slot of each instance
step_cost.py            what a step takes; the best cut for given instances
instance_assignment.py  which instances work for which stage: tabu over counts
chain_cut.py            the exact cut of a chain
layer_chain.py          what is cut: the layers in the order in which the model computes them
plan_trial.py           candidates, and their trial by a judge
access_routes.py        which links lie between hosts
link_placement.py       places where the busiest link is least busy
"""
