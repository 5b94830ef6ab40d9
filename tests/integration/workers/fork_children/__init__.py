"""Modules that the tests let a fork server run."""
