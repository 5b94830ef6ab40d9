"""Tapping."""
