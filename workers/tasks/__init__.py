"""Short-lived workers of a node agent: one task each, one answer in a file, then the process ends.

`analysis` measures a job's model and data (draft §5.3), `sample` has a trained model write a text, `files`
reads and removes what a node reads for the control plane (ADR-0040), `code` fetches and unpacks what travels
with a job (ADR-0051); `short_lived` is what they share. The
fork server starts them, confined like instances. They keep no state. `check` is another process:
`dmsc check` runs it for a job's author, and `local_steps` trains the first steps in it.
"""
