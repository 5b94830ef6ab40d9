"""Job state."""
