"""Commands that start, stop, check and maintain a mesh.

They turn options into `MeshOptions`, `RunOptions` or a `ClusterConfig` and hand them to `dmsc.launch` and
`dmsc.process`, which do the work. Only `dmsc.cli` and the commands `demo` and `policy run` call them.

demo.py    `demo`: a private mesh that trains one job and ends
doctor.py  `doctor`: checks of this machine and its mesh
machines.py  `machines`: what the provisioner orders and gives back
nodes.py   `nodes`, `cordon`, `drain`, `uncordon`
run.py     `run` (entities in this process) and `join` (this machine's slots)
up.py      `up` and `down`: a mesh on this machine
"""
