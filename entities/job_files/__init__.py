"""A job's files as SMO and MG read them: the checkpoint catalog, and files behind the job's URLs.

It decides which checkpoint folders count as published and in which order they age, and how a control-plane
process reads a URL: from the bus's object store directly, from any other place through a node agent.
`entities.orchestrator.checkpointing` and the gateway's checkpoint and artifact routes call it.
It never opens a job's URL in the control plane, and it never writes a checkpoint.

- `checkpoint_catalog`: folders, manifests and their order
- `node_files`: reads files through node agents
"""
