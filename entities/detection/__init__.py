"""Fail-slow detection, shared by SR and SMO (draft §5.5).

It decides whether an instance has become slow, or is well again, from its own service times beside those of
the job's other instances. `entities.router` judges each sample; `entities.orchestrator.monitoring.alerts`
uses it for alerts. It never reports, ejects or replaces an instance: its callers do.
"""
