"""A round's mean: partition, encoding, all-reduce and audit."""
