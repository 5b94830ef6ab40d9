"""Who works in a running job, and how members come and go (DESIGN §5 rules 8 to 10).

It decides which instance is lost to a job, where its replacement starts, which side of a network partition is
kept, who keeps a copy of whose state, and when a member may leave without a loss. `job.training` creates and
calls these services; they report losses and newcomers to the step machine through `step.StepOwner`. They
never decide about the open step itself, and start nothing on a cordoned slot.

failure_handling.py    `FailureHandling`: every loss and every broken attempt; applies the retry limits
joining.py             `JoiningMembers`: new incarnations on their way into the job
replacement.py         `Replacement`: finds a slot for a unit and starts its next incarnation
membership_changes.py  `MembershipChanges`: scaling, and instances that leave their node
drain_order.py         `DrainOrder`: which of the instances to be drained may go next
rebalancing.py         `Rebalancing`: an instance changes its stage (ADR-0018)
standbys.py            `Standbys`: standbys work while no other replica of their stage lives
peer_copies.py         `PeerCopies`: a stage with one member keeps a copy of its state at a peer
node_partitions.py     `NodePartitions`: two nodes that do not reach each other (ADR-0020)
partition.py           the rules for that: what a partition is, which side is kept; pure
"""
