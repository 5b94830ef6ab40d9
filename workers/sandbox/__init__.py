"""What users' code may reach: a process confines itself here, once, before it imports any of it (ADR-0034).

`confinement` decides the way (an own user in an own root; else Landlock) and carries it out; `mounts`,
`landlock` and `seccomp` are the kernel's three fences. Called by the fork server's children, by modules from
users' files, and by whoever has to say what is in force. It never starts a process and knows nothing of jobs.
Nothing here imports torch. Linux only; elsewhere nothing can be confined, and that is said.
"""
