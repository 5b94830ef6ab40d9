"""Runs in the trackers that people use: TensorBoard, MLflow, Weights & Biases, live or of a record.

It decides which figures of a job's events are told, at which step (`figures.py`, pure), and when a batch goes
to which sink (`tracker.py`, `recorded.py`). A sink knows by itself what it has of a job, so that each figure
of a step is there once, whenever the tracker is killed (ADR-0052): `tensorboard_sink.py`, `mlflow_sink.py`,
`wandb_sink.py`; `sinks.py` chooses them by options.

`dmsc run tracker` is a service of its own that only reads: the stream of job events, job records and
instances' samples. A sink that is away makes the tracker wait, and never a job. MLflow and W&B are extras,
imported by their sinks alone.
"""
