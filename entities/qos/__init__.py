"""Type 5 (draft §4.3) at MG and SR: policies downward, quality and fault reports upward.

It decides which revision of a job's communication policy is active (`PolicyBook`), what one cluster's traffic
amounts to over a window (`QosWindow`), and whether a fault was reported before (`FaultLedger`). The reporters
send the results to the orchestrator. Gateways and routers (`entities.gateway`, `entities.router`) own one of
each. It never judges a fault and never changes a policy: only the orchestrator does.

- `policy_book`: the active policies, pure
- `window`: sums of samples, calls and microbatches, pure
- `reporter`: sends QoS reports and termination reports
- `fault_reporter`: sends fault reports until they are acknowledged
"""
