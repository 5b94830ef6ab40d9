"""Election."""
