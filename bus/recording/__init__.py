"""Runs in files: what the streams hold of one job, written once and checked when it is read
(docs/replay.md).

It decides which messages belong to a run and in which order, and the format of the file. `dmsc runs` and
`dmsc replay` call it; the tap's own files share `frame_file`. It never decides anything about what it
recorded.
"""
