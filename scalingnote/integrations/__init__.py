"""Integrations of ScalingNote in frameworks; each module needs the extra of its name."""
