"""Commands about jobs, recorded runs, chaos runs, checks and simulations.

They ask a gateway for what the user wants of a job, or hand the options to `dmsc.follow`, `dmsc.replay`,
`dmsc.chaos`, `dmsc.sweeps`, `dmsc.syncing` or `dmsc.simulation`. Only `dmsc.cli` and neighbouring commands
call them.

chaos.py     `chaos`: faults against a running job, and what they cost
check.py     `check`: a job on this machine, without a mesh
jobs.py      `jobs`, `status`, `cancel`, `park`, `resume`, `scale`, `move`, `recut`
replay.py    `replay`: a policy against a recorded run
runs.py      `runs recorded`, `runs export`, `runs import`
comparing.py `runs list`, `runs show`, `runs compare`
sweep.py     `sweep`: one job file with several values of some keys
sync.py      `sync`: jobs from a folder of files
simulate.py  `simulate`: a scenario under a virtual clock
train.py     `train` and `attach`
"""
