"""Simulated jobs from which `change-outcomes` learns, and on which it is compared with rules.

disturbances.py     jobs, and what becomes of their devices, drawn by a seed
simulated_mesh.py   one job in `dmsc.simulation`, as a module hears of it, with changes at given moments
examples.py         the same change made and not made: features beside what came of it
closed_loop.py      a policy that changes a simulated job while it runs, judged by the orchestrator's account
"""
