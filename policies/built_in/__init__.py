"""Built in."""
