"""Measurements that print what they find; none of them is a test. Most are scripts, run by `make bench-…`."""
