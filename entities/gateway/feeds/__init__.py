"""Feeds on the bus: named, append-only records that users push and jobs train on (ADR-0064).

It decides what a record is, and in which place a push stands: its row is created once, by compare-and-set.
`operations/feeds.py` pushes, `operations/jobs.py` looks feeds up, `storage/usage.py` counts them. It never
changes a record that was stored, never looks at jobs, and never asks who may do it.

feed_records.py  what is pushed, checked and cut into pieces
feed_log.py      the rows of feeds: created, read, closed, removed
"""
