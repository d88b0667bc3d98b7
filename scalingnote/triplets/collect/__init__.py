"""From click logs and ranking models to training triplets."""
