"""Watching a run: what its peers report, its model, and where that is shown."""
