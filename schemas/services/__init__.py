"""What a model service is, and what its parties say to each other: versions, traffic, sessions, tokens."""
