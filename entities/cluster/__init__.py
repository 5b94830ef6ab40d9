"""MIC, microservice instance cluster: one agent per node (draft §3, §4.5, §5.3, §5.5).

It decides which slots a node offers, whether a start order may be obeyed, what the exit of a process means,
how far a fault reaches, and which files a job's processes may use. The orchestrator and the gateway send it
orders over the bus; `dmsc.process.composition` starts it. It never restarts an instance, never imports torch,
and never opens a job's URL itself.

- `agent`: the entity; `config` its settings, `context` what its parts share
- `core`: its decisions, pure
- `instances`: starts, watches and stops instances
- `capabilities`: what its devices can do, measured once
- `judgement`: how its instances get on, and which chains stand still
- `model_tasks`: short-lived workers that analyse a model or write a sample
- `job_code`: code that travels with jobs, fetched and unpacked in workers
- `file_requests`: reads and removes files for the control plane, in workers
- `file_reach`: the files that a job's processes may use
- `store_folders`: the instances' local stores
- `fork_server_client`, `fork_server_process`, `prefork_client`: the fork server that spawns all of these
  processes
- `leaving`: the agent's end, where its machine goes away
- `temporary_folder`: the agent's temporary files
"""
