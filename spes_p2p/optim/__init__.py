"""Optimization: the inner optimizer with its schedule, the outer optimizer, and expert merging."""
