"""The provisioner: machines come when jobs lack slots, and go when they have no work (docs/machines.md).

It decides which machines are ordered from which pool and which are given back, each with a reason, within
caps and budgets (ADR-0175 to 0177). The orchestrator tells it what is lacking; people ask through gateways.
It never decides where instances run, nor takes a machine that has work, unless its budget is used up. One of
any number leads; all that it knows is in the bucket `machine_pools`.

- `decision`: pools, machines and demand in, orders and returns with reasons out; pure
- `pool_state`: what is to be believed of machines, by driver, orchestrator and clock; pure
- `pools_file`: the file of pools
- `pool_book`: the pools' records, by compare-and-set
- `leader`: the work of the one that leads: hears, decides, writes, asks drivers
- `machine_requests`: what people ask of it
- `node_emptying`: how a machine's node is emptied
- `service`: stands for the lead
- `drivers`: processes of this machine; commands of the user; pods of a Kubernetes cluster
"""

from entities.provisioner.leader import ProvisionerConfig
from entities.provisioner.service import Provisioner

__all__ = ["Provisioner", "ProvisionerConfig"]
