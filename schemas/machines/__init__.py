"""What is said about machines that come and go by themselves (docs/machines.md).

- `demand`: which slots jobs and versions lack, and how the machines of pools are used; from the orchestrator
- `pools`: where machines come from, and what they may cost: the file of pools
- `kubernetes`: of these, what is said of machines that are pods
- `records`: which machines were ordered, in which state they are, and why; the provisioner's
- `commands`: what people ask of the provisioner, and its answers
"""
