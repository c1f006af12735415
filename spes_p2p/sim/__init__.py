"""Virtual peers in one process: a swarm in memory, a virtual clock, attackers, scenarios."""
