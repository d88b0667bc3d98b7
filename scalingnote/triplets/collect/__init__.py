"""Training triplets from click logs and ranking models."""
