"""Jobs from a folder of files, as Git has them: `dmsc sync` makes the mesh's jobs agree with it (ADR-0185).

It decides which files' jobs are submitted, and which jobs are cancelled because their file has changed or is
gone. It never changes what it has not submitted itself, and starts no job again whose file is as it was.

- `job_folder`: the folder's files, checked, with the digest of all that decides about each job
- `sync_plan`: which jobs are missing and which are outdated; pure
- `driver`: reads the jobs from a gateway, and carries the plan out

There is no store: a job's name says of which folder and file it is, with which digest. `dmsc sync` calls it.
"""
