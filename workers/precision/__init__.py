"""Which types a job's numbers have: parameters, fp32 masters, the scale of the loss, int8 bases (ADR-0061).

Called when a model is built (`workers.compute.model`), by the optimizer, and by whoever reads or writes
files of weights. What is here is a pure function of the weights, or of the steps applied. So bits depend
neither on cuts nor on replicas. It never sees the bus, and never decides that a step is left out: the ledger
does.

parameter_types.py   parameters and what the model takes in the job's `model.dtype`
masters.py           fp32 masters of trained parameters in half precision
loss_scale.py        dynamic loss scaling, for fp16
int8_linear.py       frozen linear layers with int8 weights
"""
