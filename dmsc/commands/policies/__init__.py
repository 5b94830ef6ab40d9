"""Commands about policies: the functional modules of a mesh (draft: FM).

`policy run` runs a policy as a process on the bus; the other commands ask a gateway, a mesh or a recorded
run. What becomes of a policy's suggestions is decided by the orchestrator, never here. Only `dmsc.cli`
calls these modules.

policy.py           `policy run`, `new`, `list`, `enable`, `disable`, `order`, `ask`
learnt_state.py     `policy state`
training.py         `policy train`
policy_versions.py  `policy score`, `promote`, `rollback`, `plot`
"""
