"""Dispatch."""
