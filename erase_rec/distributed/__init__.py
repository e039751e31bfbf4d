"""Ranks that train together: process group, log of collectives, replicated tables, guards."""
