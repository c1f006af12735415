"""Versions: kept, offered, fetched from whoever has them, verified."""
