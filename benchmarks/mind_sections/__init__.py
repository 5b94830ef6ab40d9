"""The parts of `benchmarks.mind`: what happens to a mesh, how a run is measured, and what was possible.

scenarios.py  scripts, drawn by a seed: what becomes of which slot and when, and what is done to the mesh
oracle.py     the step of the best plan for the slots as they are, by the planner's cost, at each moment
runs.py       one job under one script: steps in the calm before, and while the script runs
results.py    paired ratios with their bounds, the part of the gap that was closed, forecasts beside outcomes
"""
