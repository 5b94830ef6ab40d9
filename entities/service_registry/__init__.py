"""Service registry."""
