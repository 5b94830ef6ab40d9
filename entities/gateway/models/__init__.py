"""Models at the door: what users ask the registry, and what `model://` and `register` stand for in a job.

Reads are answered from this gateway's copy of the registry's records; what changes a record is sent to a
registry, after Type 3. The version that a job begins with is fixed when the job is submitted.

operations.py   `ModelOperations`: versions, aliases, approvals, evaluations, rules
resolution.py   `with_models`: the job with the version that it names
"""
