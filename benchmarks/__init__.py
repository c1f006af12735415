"""What the numbers in docs/benchmarks.md come from."""
