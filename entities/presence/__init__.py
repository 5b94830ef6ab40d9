"""How MG and SR know who is in the mesh, and make themselves known to the orchestrator.

`RegistryFollower` keeps a copy of the registry current by Type 2 (draft §4.3), `keep_registered` sends the
node registration of draft §4.4(1) to the orchestrator, and `InstanceSubscriptions` subscribes to the messages
of a changing set of instances. `ServiceArea` decides which clusters without a gateway (or router) another
cluster's serves. Gateways and routers use all four. `entity_record` makes the record of any entity's service.
This package decides nothing else: it never writes a registry record, and it goes on with its last copy while
the registry is away. Registering a service in the registry itself is `bus.mesh.registration`.
"""
