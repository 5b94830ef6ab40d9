"""Membership."""
