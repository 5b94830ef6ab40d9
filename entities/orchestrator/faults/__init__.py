"""Faults: where each one is, how far it reaches, and what became of it (draft §4.4(5), §5.5).

`job.job_run` has a reported fault located and acts on the verdict; `recovery.failure_handling` and
`nodes.cordon_service` open and close faults in the queue. The queue limits how often one task is tried again,
and is written beside the recovery: a bus that is away delays nothing. Nothing here replaces an instance.

fault_location.py  `locate`: asks SRD and MIC; `judge_fault`: the verdict, pure
fault_queue.py     `FaultQueue`: every fault from report to end, on the stream `FAULT_QUEUE`
"""
