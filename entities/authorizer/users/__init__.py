"""The users of a mesh: their sealed records, their tokens and revocations.

It decides whether a user command can be carried out (name free, role given, token lifetime) once the rules
allow it. `entities.authorizer.service` calls it; connection authorizers read the directory.
It never checks whether the actor may give the command, and never stores a token, only its id.

- `directory`: the present users, from the file and the bus
- `operations`: carries out user commands
- `records`: the bucket `users`, sealed to the authorizers
"""
