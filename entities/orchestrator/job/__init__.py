"""One job's life (draft §4.4): analyse, plan, deploy, train, finish, clean up, and recovery in between.

`job_runs` keeps all jobs of a term, `job_run` drives one to its end; `deployment` brings it to its
instances, `training` runs its steps, `teardown` frees what it held. The leader calls it. It decides in
which order the other rooms act for a job, and never decides a step by itself.
"""
