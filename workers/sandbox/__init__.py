"""The confinement of users' code: a process confines itself once, before it imports any of it (ADR-0034).

`confinement` decides the method (an own user in an own root; else Landlock) and applies it. Children of the
fork server and modules from users' files call it; the command line calls it to show which method is in force.
It knows nothing of jobs and never imports torch. It works on Linux only; on other systems the method is
`none`, and that is reported.

- `mounts`, `landlock`, `seccomp`: the kernel's three mechanisms.
- `users`, `hidden_paths`: free user ids; secrets in given folders that stay hidden.
- `kernel`: system calls for which Python has no function.
"""
