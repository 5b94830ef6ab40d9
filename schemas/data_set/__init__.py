"""Data sets that the mesh builds: the file that describes a build, its units of work, and the manifest.

Decides what a build, a unit and a manifest are, and what their digests cover. The orchestrator, node agents,
the gateway and workers use it. It opens no file, and does no work of a step itself.
"""
