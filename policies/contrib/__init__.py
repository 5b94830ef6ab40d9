"""Contrib."""
