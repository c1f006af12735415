"""How peers meet: identity, records, claims, rosters, averaging, exchange. Knows tensors, not models."""
