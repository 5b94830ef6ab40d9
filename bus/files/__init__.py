"""Files that outlive a process: artifacts behind one kind of URL, feeds, and safe ways to open local ones.

It decides what a URL (`bus://`, `file://`, `memory://`, fsspec's) opens, and which local file may be opened
at all. Instances, node agents, gateways and the orchestrator call it. It never decides which URLs a job may
name: that is `schemas.urls` and the node's own rules.
"""
