"""The way back: from what a service has kept to a version of it that gets a share of its traffic.

`dmsc service learn` calls it. It decides which job is trained and whether its weights are good enough; all
that happens is done by requests to a gateway, each with a key, so that one that is repeated does nothing
twice. It gives no version traffic unless it is told how much (ADR-0166).

learning.py  the steps, in order
jobs.py      pure: the job that learns, the one that says how good the present weights are, the next version
"""
