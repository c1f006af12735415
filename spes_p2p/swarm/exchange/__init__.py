"""Versions: stored, offered, fetched from several peers, verified."""
