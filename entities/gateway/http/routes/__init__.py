"""The HTTP door's resources, one module each; each gives a router over the door's context."""
