"""How machines are had: each driver orders, lists and releases them by name (docs/machines.md, ADR-0177).

A driver decides nothing and keeps nothing: what was ordered is in the mesh's records. Its errors say what is
certain: after `Refused` there is no machine, after `Unavailable` there may be one.

- `machine_driver`: what each of them does
- `local_driver`: node agents as processes of this machine
- `command_driver`: the user's own commands
- `kubernetes_driver`: pods of a Kubernetes cluster
- `kubernetes_manifest`: what a machine is there
"""
