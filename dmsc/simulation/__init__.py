"""`dmsc simulate`: the mesh's own decisions under a virtual clock; see docs/simulator.md."""
