"""What is kept of a running job: its record and events, its instances, its secrets, and the limits of trying
again.

`job_store` checks, keeps and publishes each transition; `instances` starts, finds and stops incarnations
and gives them orders; `decision_record` is the commit point; `policy_distribution` brings communication
policies to gateways and routers; `retry_limits` and `quarantine` say when to stop trying. All other rooms
of a job use it. It decides no recovery.
"""
