"""Gates and the three-way decision: pure functions from results to a verdict."""
