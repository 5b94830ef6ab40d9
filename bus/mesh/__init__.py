"""A service's place in the mesh: registered, found, and with its sealed values up to date.

`registration` announces a service to the registry (draft §4.3 Type 1), keeps it alive and takes it back;
`discovery` asks the registry; `store_queries` asks instances' local stores; `resealing` seals stored
secrets anew when keys change. Every service calls it. It never decides whether a record is believed: that
is the registry.
"""
