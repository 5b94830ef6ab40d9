"""Public training scripts beside DMSC: what is recorded, and what their users write here.

`benchmarks.compare_scripts` runs them. Nothing of the scripts themselves is here.

recorder.py     runs a script as it is, and records its samples, losses and first weights
made_data.py    what the scripts are trained on
replayed.py     the recorded samples as a data set of a job
operators.py    lets torchvision's source be imported uncompiled
NAME/           the lines that a user writes: job.yaml, and own.py where Python is needed
"""
