"""Random bytes and structures for every decoder that meets a stranger's bytes."""
