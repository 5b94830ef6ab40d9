"""A job's checkpoints: when the next is due, who writes it, which are kept (ADR-0011).

`checkpoint_schedule` decides the interval from costs and failures, pure; `checkpoints` has the stages write
at step boundaries and publishes whole sets; `job_artifacts` finds and removes them in the job's own folder;
`publishing` has an instance write a small file there. A job's training calls it. It never reads a tensor.
"""
