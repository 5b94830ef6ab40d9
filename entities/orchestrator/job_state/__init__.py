"""What the orchestrator records and counts of one job, and the job's instances.

It decides when trying again is pointless (`RetryLimits`, `Quarantine`) and which gateway dispatches
for the job (`IngressGateway`), and it keeps the job's state: its record and events, the decision record, the
policies that were issued, the secrets. The packages `job`, `step`, `recovery`, `membership`,
`checkpointing` and `data_builds` call it. Nothing here is written over the record of a later epoch.

context.py              `JobContext`: what the parts of one job's run share
owned_record.py         `OwnedRecord`: a record that only its orchestrator writes, by compare-and-set
job_store.py            `JobStore`: the job's record (compare-and-set) and its event stream
event_writer.py         `EventWriter`: writes events of the training in order, beside it
decision_record.py      `DecisionRecord`: the decision of the last step; the commit point
instances.py            `JobInstances`: starts and stops instances, gives them orders
policy_distribution.py  `PolicyDistribution`: brings communication policies to gateways and routers
ingress_gateway.py      `IngressGateway`: which gateway dispatches microbatches for the job
job_faults.py           `JobFaults`: one job's part of the fault queue
retry_limits.py         `RetryLimits`: how often a step may fail; pure
quarantine.py           `Quarantine`: microbatches that fail wherever they run; pure
guarded_tasks.py        `GuardedTasks`: background tasks whose first failure reaches their owner
job_secrets.py          secrets that a job's URLs name
link_secret.py          the secret of a job's tensor links
"""
