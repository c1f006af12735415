"""Many simulations: their settings, workers, results and report."""
