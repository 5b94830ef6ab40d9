"""The clients of a mesh's HTTP API: `dmsc.Client` for scripts and `dmsc.AsyncClient` for coroutines.

The client decides which gateway it asks, when a request may be repeated, and when it gives up; the gateways
decide everything else. Users' scripts, the commands of `dmsc`, `dmsc.follow` and `dmsc.launch` use it. It
never connects to the bus.

access_calls.py      requests about users, rules, secrets and audit; a part of `AsyncClient`
async_client.py      `AsyncClient`: one method per request
code_calls.py        submissions with code, and archives of code; a part of `AsyncClient`
client.py            `Client`: the same without `await`
gateway_requests.py  sends requests to whichever gateway answers; repeats and resumes them
http_protocol.py     headers, errors, positions, server-sent events; no network I/O
job_file.py          reads and checks job files
loop_thread.py       an event loop on its own thread
policy_calls.py      requests about modules, automation and observations; a part of `AsyncClient`
submitted_job.py     `Job`: the handle that `train` returns
train_calls.py       `train`: a job from functions of a notebook; a part of `AsyncClient`
weights_check.py     checks downloaded weights and checkpoints
"""
