"""One machine at work: its process group, its local steps, the round, its checkpoint."""
