"""Checkpoints of a job: when one is due, how it is written, published, restored, removed (ADR-0011).

`job.training` asks `Checkpoints` at each boundary and when all go back; instances write the states, and the
manifest makes a checkpoint exist. A checkpoint that fails costs nothing but itself: training goes on. Outside
the bus the orchestrator opens no file: nodes read and remove, instances publish (ADR-0040).

checkpoints.py          `Checkpoints`: takes them at boundaries, publishes beside the training, restores
checkpoint_schedule.py  `choose`: when the next one is due, and why (Young, Daly); pure
job_artifacts.py        `JobCheckpoints`: lists, publishes and removes a job's checkpoints
named_checkpoint.py     `named_checkpoints`: what `resume_from` names, and its class of bits
publishing.py           `publish_file`: has an instance write a file of the job
weight_export.py        `export_weights`: the weights of a finished job, with their index
"""
