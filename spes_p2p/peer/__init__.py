"""One peer, from its start to its end."""
