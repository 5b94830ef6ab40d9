"""How requests of a service ended, told to whoever judges its versions (ADR-0150).

The generation rooms call it for each answer that is over. It decides what counts as a version's fault, and
which services have anything to judge. It never sees a prompt or an answer, and judges nothing itself.

request_outcome.py   pure: an answer that is over, as an outcome
outcome_reports.py   outcomes gathered, and published twice a second
"""
