"""Messages and records for tests, by the field's name of each, with keyword arguments and plain defaults.

One file per domain; a builder stands here when at least two files of tests use it.
What a test is about it says itself, in an argument; everything else is the builder's.
"""
