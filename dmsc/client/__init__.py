"""The clients of a mesh's HTTP API: `dmsc.Client` for scripts and `dmsc.AsyncClient` for coroutines.

The client decides which gateway it asks, when a request may be repeated, and when it gives up; the gateways
decide everything else. Users' scripts, the commands of `dmsc`, `dmsc.follow` and `dmsc.launch` use it. It
never connects to the bus.

async_client.py      `AsyncClient`: one method per request
calls                parts of `AsyncClient`, each about one thing
client.py            `Client`: the same without `await`
gateway_requests.py  sends requests to whichever gateway answers; repeats and resumes them
http_protocol.py     headers, errors, positions, server-sent events; no network I/O
job_file.py          reads and checks job files
loop_thread.py       an event loop on its own thread
submitted_job.py     `Job`: the handle that `train` returns
weights_check.py     checks downloaded weights and checkpoints
"""
