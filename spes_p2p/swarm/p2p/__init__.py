"""One peer's identity, its p2pd and DHT node, and the peers that it can reach."""
