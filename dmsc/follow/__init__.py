"""Follows a job to its end: shows it, writes its loss curve, and fetches its weights.

`dmsc train`, `attach` and `demo` call `follow.follow`. This package decides what a person sees of a run and
which files the run leaves on this machine. It reads job events and load from a gateway through `AsyncClient`,
and changes nothing in the mesh, except that Ctrl-C may cancel the job.

curve.py      writes `curve.jsonl`, `validation.jsonl` and a TensorBoard file
follow.py     the loop: events → state, view and curve
live_view.py  the views: a live one on a terminal, lines elsewhere
run_state.py  the state of a run, from job events; pure
"""
