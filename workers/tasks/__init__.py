"""Short-lived workers of a microservice instance cluster (MIC): one question, one answer in a file.

The control plane has no torch and opens no files that users name. So a node agent has the fork server start
one of these processes, and reads its answer. None of them registers or trains; each ends after its answer,
even if that is an error.

- `analysis`: builds and measures a job's model (draft §5.3).
- `sample`: generates a text with the trained model.
- `files`: reads, lists or removes below one URL of a job (ADR-0040).
- `short_lived`: the answer and the bus connection that all share.
"""
