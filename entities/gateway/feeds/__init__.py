"""Operations on feeds: named, append-only records that users push and jobs train on (ADR-0064).

It decides who may push to and close a feed, and whether the pusher's quota has room.
`http/routes/datasets.py` calls it; `storage/feed_log.py` writes the rows, and `storage/feed_records.py`
checks records. It never changes a record that was stored, and never looks at jobs.
"""
