"""What scale costs and what it buys: a run's cost from its config, scaling laws, the plan of a whole system."""
