"""Mesh."""
