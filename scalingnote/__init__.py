"""ScalingNote: train with an LLM in both towers, serve with a query tower that costs almost nothing."""

__version__ = "0.1.0"
