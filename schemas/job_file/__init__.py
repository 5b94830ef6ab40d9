"""The sections of a job file, as a user writes them; `schemas.job.JobSpec` is the whole.

What a section means is decided where it is used; here are its fields, their bounds and their defaults. No
field's meaning depends on another section, except where `JobSpec` checks it.
"""
