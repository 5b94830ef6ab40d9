"""Commands about model services. They ask a gateway; only `dmsc.cli` calls them.

ask.py         `dmsc ask`: an answer, as it comes
batch.py       `dmsc batch`: the answers to all requests of a file
serving.py     `dmsc serve`: deploy a version of a service, and wait until it is ready
consents.py    `dmsc consent …`: whether services may keep requests
learning.py    `dmsc service kept|learn`, `dmsc data erase`: what was kept, and the way back
services.py    `dmsc service …`: list, show, traffic, promote, rollback, shadow, scale, stop
ramping.py     a version's share raised step by step
"""
