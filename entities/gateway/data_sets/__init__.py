"""Data sets at the door: builds of them, their versions, and what `dataset://` stands for in a job.

It decides what a build may name, and which version a job reads: that is fixed when the job is submitted. The
routes in `http/routes/data/built.py` call it, and `operations/jobs.py` for each submission. It plans no build
and reads no record: the orchestrator and processes of nodes do.

operations.py   `DataSetOperations`: submit, list, cancel builds; list, delete versions
resolution.py   `resolved`: the job with the version of each data set that it names
"""
