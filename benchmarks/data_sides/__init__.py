"""The sides of `benchmarks/data.py`: the files that all read, and a process for each way to read them.

A side is called with the same task, reads each epoch to the end, and prints one line of JSON: samples per
second of each epoch, and the unique memory of its processes.
"""
