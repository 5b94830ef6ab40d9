"""What the orchestrator knows of the mesh: nodes, gateways, routers, the state of every incarnation,
cordons.

`mesh_view` follows the registry and the node agents' reports; `cordons` is the book of places that get no
new instances. Planning, jobs and operators' requests read it. It decides nothing.
"""
