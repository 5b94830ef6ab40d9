"""The routes below `/v1/accounts`: statements of what was used and what it costs."""
