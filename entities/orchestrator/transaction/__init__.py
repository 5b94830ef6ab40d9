"""Transaction."""
