"""How long tests wait."""

PATIENCE_S = 300.0
"""Seconds for whatever is certain to come. It ends a test that would hang, and says nothing of how long
anything may take: where the host has taken nine tenths of the cores away, all must still pass.
"""

NEVER_S = 3600.0
"""Seconds, for a limit of the product that no test waits for: what ends sooner, something else has ended."""
