"""What `dmsc tap` does: listens to the bus or reads a file, and shows, records or follows messages.

Only the command `tap` calls `session.py`; `policy run` uses `role.py`. The package decides which kind of tap
the options mean, and what a user's role may see according to a gateway. Decoding, filtering and recording
themselves are in `bus.tap`. A tap never sends anything to the mesh.

printing.py  prints messages, hops and trees
request.py   the options of `dmsc tap`
role.py      the user's token and what its role may see
session.py   the kinds of taps: live, recorded, rates, one microbatch, a tree of causes
"""
