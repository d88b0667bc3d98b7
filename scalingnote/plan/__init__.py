"""What scale costs and what it buys: a run's cost from its config, scaling laws, a whole system's plan."""
