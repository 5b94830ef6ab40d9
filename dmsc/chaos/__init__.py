"""`dmsc chaos`: a seeded plan of faults against a running job, and what they cost.

plan       pure: when, what kind, which of those that are alive
history    pure: job events and decisions → which commits count, what was lost, doubled, redone
report     pure: history and faults → stalls, goodput, waste, hashes, verdict
processes  the mesh's processes on this machine: found, verified, struck
run        the shell around them; `present` and `plot` show the report
"""
