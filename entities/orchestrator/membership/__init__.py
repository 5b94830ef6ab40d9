"""Members of a running job that come, go and change by wish, not by a loss (DESIGN §5 rules 9 and 10).

It decides when replicas are added or dismissed, when a member may leave its node without a loss, how an
instance changes its stage, and when stages get other layers. `job.training` creates and calls these services;
new members join through `recovery.joining`, and the step machine learns of them through `step.StepOwner`. It
never decides about the open step itself; losses are `recovery`'s matter.

membership_changes.py  `MembershipChanges`: scaling, and instances that leave their node
drain_order.py         `DrainOrder`: which of the instances to be drained may go next
job_actions.py         `JobActions`: what a job does of what modules suggest (ADR-0092)
job_changes.py         `JobChanges`: changes under way, judged, told and taken back
route_account.py       what weights and avoided instances were worth, as forecast and as measured; pure
stage_moves.py         which move between stages is possible; pure
job_shape.py           `JobShape`: replicas and stages as people ask for them
slot_holding.py        `SlotHolding`: what the queue sees of a job, and has it do
rebalancing.py         `Rebalancing`: an instance changes its stage (ADR-0018)
fewer_stages.py        `FewerStages`: where a loss can't be staffed, until there is room (ADR-0090)
recutting.py           `Recutting`: stages get other layers while the job trains (ADR-0090)
recut_plan.py          what a plan makes of a task graph, who sends what, why it is refused; pure
best_cut.py            the cut with the least bottleneck for the speeds that stages show; pure
leaving/               how instances leave machines that go away at a deadline (ADR-0171)
measured_speeds.py     what stages and steps take now, by their claims; pure
"""
