"""A job's data: which samples are where, and batches made of them (draft §7.2(1), ADR-0046).

A batch is a pure function of (job, seed, step, microbatch, sample): whoever makes it, again or elsewhere,
makes the same bits, so there is no state to save. `order` says which sample is where; `kinds` and the rooms
beside it read what people have; `opening` puts both together for data instances
(`workers.stage.data_runtime`) and for the analysis at submission
(`workers.tasks.analysis`), which alone run it. It knows no model, no step transaction and no links.
"""
