"""Nats."""
