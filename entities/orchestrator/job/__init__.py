"""One job's life (draft §4.4): analyse, plan, deploy, train, export the weights, clean up.

`JobRuns` holds the jobs of a term; it creates a `JobRun` per job and epoch. A run decides in which state its
job is and what happens when something fails: go on, go back to the checkpoint, park, or end. It calls all
other packages of the orchestrator. It never acts for a job whose record belongs to a later epoch: each write
raises `Fenced` then.

job_runs.py            `JobRuns`: all jobs of one term: submitted, taken over, driven to their end
term.py                `TermContext`: what the jobs of one term share
job_run.py             `JobRun`: the states of one job, from the queue to its end
awaited_data.py        waits for builds of the data sets that the job reads
deployment.py          `Deployment`: waits for room, plans, starts the instances
training.py            `Training`: steps, boundaries, roll-backs, steps that are left out
takeover_service.py    `TakeoverService`: adopts the living instances of an earlier orchestrator
parking.py             `Parking`: a person parks or resumes the job
bus_outages.py         `BusOutages`: tries work outside the steps again while the bus is away
model_analysis.py      `ModelAnalysis`: topology and text sample, computed by node agents
teardown.py            `Teardown`: termination and clean-up; what a killed leader left
services/              versions of model services: jobs that serve, and the records of services
unreadable_records.py  `RecordGuards`: replaces values in buckets that nobody can read (ADR-0038)
"""
