"""The short-lived workers."""
