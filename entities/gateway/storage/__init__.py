"""Accounting of what users store on the bus: data sets, artifacts of their jobs, and uploads under way.

It decides whether a user's quota has room for one more upload or job, and whose data set a name is. Uploads
reserve their bytes by compare-and-set in records that all gateways share, so that two gateways never admit
more than the quota together (docs/gateway.md).

`usage.py` holds the sums and the admission of a job; `uploads.py` holds reservations and ownership.
`operations/` asks before a job is submitted and for `whoami`; `http/routes/datasets.py` asks around each
upload. The package never stores a data set's bytes, never sets a quota (the authorizer's rules do), and
never removes anything to make room.
"""
