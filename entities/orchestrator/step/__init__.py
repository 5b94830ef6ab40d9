"""The service around the step transaction: it carries out what `transaction/` decides.

`StepOwner` opens a `StepLoop` where the job stands and closes it again. The loop hands every event to the
step machine and starts a task for each effect that the machine returns. Training and the packages
`membership` and `job` call it; it tells them about decisions and losses through `StepObserver`. It decides
nothing about a step itself, and repeats orders until they are answered (DESIGN §5 rule 11).

step_owner.py       `StepOwner`: the open step, and the loop that runs it, if one does
step_loop.py        `StepLoop`: events in, effects out; the boundary, validation, the clock of the step
step_orders.py      `StepOrders`: begin, assign, form group, prepare, record, send state
member_orders.py    `MemberOrders`: fence, abort and commit, with their deadlines
claim_repair.py     `ClaimRepair`: asks quiet instances what they hold; finds a step that stalls
evaluation.py       `evaluate`: a validation's values from its claims, added exactly, pure
validation_pass.py  `ValidationPass`: the loss on held-out data at a boundary
step_observer.py    `StepObserver`: what the loop reports to its owner
"""
