"""Faults (draft §4.4(5), §5.5): queued, located, and followed to their end.

`fault_queue` keeps every fault from report to end with its limits, `job_faults` is one job's part of it,
`fault_location` asks the registry and the node agent where a fault is and how far it reaches. A job's run
calls it. It never replaces an instance: that is `membership`.
"""
