"""Parts of `AsyncClient`: the requests about one thing each.

A part says what a request asks for, and its answer; `gateway_requests` decides who is asked, and again.

access_calls.py      users, rules, secrets, audit
account_calls.py     what was used, and what it costs
array_calls.py       arrays of jobs
backflow_calls.py    what services keep of requests: consents, feedback, files, erasure
batch_calls.py       batches of requests, and the files that they read and write
code_calls.py        submissions with code, and archives of code
generation_calls.py  answers of services: texts, tensors, vectors, several calls in one
machine_calls.py     machines that come and go
model_calls.py       versions of models, aliases, lineage
policy_calls.py      modules, automation, observations
service_calls.py     versions of services, their traffic and replicas, their end
shape_calls.py       replicas, moves and cuts of running jobs
train_calls.py       `train`: a job from functions of a notebook
"""
