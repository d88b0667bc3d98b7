"""Costs and benefits of scale: the cost of a run by its config, scaling laws, the plan of a system."""
