"""Routes of what the mesh makes of data, and of records, apart from files that users store (`/v1/datasets`).

built.py   builds of data sets, and their versions: `/v1/data`
feeds.py   feeds, and the records that are pushed to them: `/v1/feeds`
"""
