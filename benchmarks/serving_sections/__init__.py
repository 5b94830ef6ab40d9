"""The parts of `benchmarks.serving`: each section measures one promise of model services.

versions.py     files of versions, a mesh to serve them, waiting until they are ready
answers.py      pure: mixed requests, and an answer beside the same request's answer alone
rebuilds.py     pure but for its tap: what was lost with an instance, and what was computed anew
exactness.py    section: tokens and digests of several cuts, and under kills, beside each request alone
gap.py          section: how long a killed replica interrupts, and what its rebuild computes
door.py         section: what door and mesh add per token
zero.py         section: the first token of a version that had given its slots back
arithmetic.py   section: exact and plain arithmetic, and transformers, in one process; OpenVINO (`open_vino/`)
peers.py        section: a served model beside LitServe (`lit_server.py`), and two cores beside one
predict.py      section: tensors by /v1/predict beside LitServe
pinned.py       processes on cores of their own, and a LitServe server that is ready
in_process.py   a model as an instance serves it, in the benchmark's own process
"""
