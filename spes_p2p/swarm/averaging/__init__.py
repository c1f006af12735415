"""One averaging per round: matchmaking, partition, all-reduce, and the decision on what counts."""
