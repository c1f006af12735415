"""The monitor peer: watches a run, draws its one true loss curve, and takes the model home."""
