"""What `data.preprocess` does between a source's samples and the batch, one sample to one sample (ADR-0062).

`functions` are those that come with DMSC, and the user's own; `chain` applies them under seeds that depend on
(seed, step, microbatch, sample) alone, so that whoever does it again gets the same; `records` is a sample on
its way between two instances; `preprocessed` is the whole chain in one process, for analysis and check. Which
instance does what is decided in `workers.stage` and `workers.transaction.pull_machine`.
"""
