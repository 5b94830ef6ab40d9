"""The shell of the step transaction: it has the machine decide and carries out the effects
(docs/step-transaction.md).

`step_loop` takes events and gives effects to `step_orders`; `claim_repair` asks for what the bus lost;
`validation_pass` measures the validation loss at a boundary; `step_owner` opens and closes the loop.
Training calls it. It decides nothing that `transaction` decides.
"""
