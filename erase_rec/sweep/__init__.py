"""Sweeps: many runs of one configuration, expanded from a file, identified by content, run and resumed."""
