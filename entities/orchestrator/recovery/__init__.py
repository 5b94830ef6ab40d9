"""Recovery of a running job: from a loss to the replacement that works (draft 4.4(5), DESIGN §5 rule 8).

It decides which instance is lost to a job, where its replacement starts, which side of a network partition is
kept, and who keeps a copy of whose state. `job.training` creates and calls these services; they report losses
and newcomers to the step machine through `step.StepOwner`, which repairs the open step (`transaction`). They
start nothing on a cordoned slot. Faults are located and queued by `faults`; members that come and go by wish
are `membership`'s matter.

failure_handling.py    `FailureHandling`: every loss and every broken attempt; applies the retry limits
fault_choices.py       `FaultChoices`: modules have a say in a fault at hand; measured (ADR-0099)
replacement.py         `Replacement`: finds a slot for a unit and starts its next incarnation
joining.py             `JoiningMembers`: new incarnations on their way into the job
standbys.py            `Standbys`: standbys work while no other replica of their stage lives
peer_copies.py         `PeerCopies`: a stage with one member keeps a copy of its state at a peer
node_partitions.py     `NodePartitions`: two nodes that do not reach each other (ADR-0020)
partition.py           the rules for that: what a partition is, which side is kept; pure
"""
