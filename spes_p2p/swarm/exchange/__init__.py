"""Versions: stored, served, fetched in blocks from all that have them, verified."""
