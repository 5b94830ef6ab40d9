"""Late binding: which instance of the next stage gets this microbatch (docs/step-transaction.md, ADR-0016).

It decides by the route table's weights, the receivers' windows and measured speed, through a balancer that
a job names (`algorithms`): one of ours, or a user's `module:factory`. The pure machines of
`workers.transaction`, and the simulator, call it. It does no I/O, and never sends anything.
Where the job has an admission rate, a sender's pace (`admission`) holds microbatches back before that.
"""
