"""The broker: makes JetStream calls for all processes below the control plane (ADR-0031).

Instances, node agents, modules and users reach it over the bus: it reads streams and buckets, stores objects
and forwards rendezvous calls for them. It decides nothing itself: `bus.guard.call_rights` decides which
caller may make which call, and `bus.broker.relay` makes it. It keeps no state, and any number of brokers
share the calls. In the simple mode, where the server enforces no rights, nobody uses it.
"""

from entities.broker.service import Broker, brokering

__all__ = ["Broker", "brokering"]
