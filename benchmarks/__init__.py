"""What the numbers in docs/benchmarks.md and benchmarks/results/ come from."""
