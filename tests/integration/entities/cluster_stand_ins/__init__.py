"""Stand-ins for the modules that a node agent's fork server runs: small, and obedient to the test."""
