"""The broker: reads streams and buckets, stores objects, meets, for everybody below the control plane.

What it may do for whom is decided in `bus/guard/call_rights.py`; it keeps nothing, and any number may run
(ADR-0031). In the simple mode, where the server holds nobody to anything, nobody asks it.
"""

from entities.broker.service import Broker, brokering

__all__ = ["Broker", "brokering"]
