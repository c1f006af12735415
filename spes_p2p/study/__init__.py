"""The convergence lab: many scenarios, each with several seeds, run side by side, compared and reported."""
