"""How the model learns: schedule, inner optimizer, outer optimizer, expert merging."""
