"""What the orchestrator knows of the mesh: nodes, gateways, routers, instances, cordons.

`MeshView` is fed by registrations (draft §4.4(1)) and by the registry's bucket, also in an orchestrator that
only follows. Nearly every package of the orchestrator reads it, and waits for its changes instead of polling.
It decides nothing and sends nothing.

mesh_view.py  `MeshView`: the present state, and waiting for a change of it
node_links.py `NodeLinks`: bandwidth and latency between nodes, as agents registered them; pure
cordons.py    `CordonBook`: which slots and nodes get no new instances; pure
"""
