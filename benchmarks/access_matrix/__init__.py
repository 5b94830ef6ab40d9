"""Whether anybody gets more than their role: a live guarded server is asked for everything, and watched.

Attackers are raw sockets with every kind of credential, none of our clients (`wire`). What each may cause
and learn stands in a table of effects, written by hand (`effects`): it knows nothing of
`bus.guard.permissions`. The world around them is real (`world`): a nats-server with its guard, all streams
and buckets with something marked in them, and our services on every row that is answered. Each probe
(`probes`) is one thing tried; what was stored, heard by anybody, or came back is compared with the table
(`trial`). `widened` spoils the guard's lists on purpose, one at a time: each must be found.

`make audit` runs all of it; `tests/integration/guard/test_access_matrix.py` a part. Nothing here decides who
may do what.
"""
