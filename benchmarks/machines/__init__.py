"""Machines that come and go by themselves (docs/machines.md): how soon, how often, and whether gangs end.

It measures the provisioner from outside, on real meshes whose own nodes have no slots, with machines of the
driver `local`, and with pods of a real API server where there is one. What a figure means is said by the
section that measures it.

__main__.py  the command line
cycle.py     from no machine to the first step, and back to none
gangs.py     two jobs of which one at a time has room
kills.py     provisioner and orchestrator killed meanwhile: what is ordered twice
pods.py      pods of a real API server (benchmarks.kubernetes): how soon, and under kills of it, too
scene.py     the mesh, its provisioner, and all that was ever written of machines
"""
