"""Traces of jobs through the queue in virtual time: `dmsc simulate --queue` and `benchmarks/job_queue.py`.

trace_files.py     traces of Gavel, of Tiresias, and tables of one's own
queue_settings.py  slots, rules and elasticity of a simulated queue
trace_run.py       runs a trace, and sums up what became of its jobs
"""
