"""Jobs that wait: whose turn it is, who holds which slots, and what a user's quota allows.

`job_queue` decides the order (pure), `slot_demand` is what jobs know of each other, `admission` compares
with quotas. Submission and deployment call it. It never places a unit.
"""
