"""Commands that show what a running mesh does; none of them changes anything.

`dashboard` and `faults` ask a gateway. `logs` and `store` read from the bus. `tap`, `top` and `routes` read
from the bus and ask a gateway. The mesh never waits for any of them. Only `dmsc.cli` calls these modules.

dashboard.py  `dashboard`: opens the dashboard in a browser
faults.py     `faults`: the fault queue
logs.py       `logs`: structured log lines of the services
store.py      `store`: the local store of one instance
tap.py        `tap`: decoded messages as they travel
top.py        `top` and `routes`: load and routing, live
"""
