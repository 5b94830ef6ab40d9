"""What `dmsc cost` needs beside the gateway: periods as people write them, and accounts of a recorded run.

The rules are the accountant's own (`entities.accountant`); a recording is read from its file, or from a mesh.
"""
