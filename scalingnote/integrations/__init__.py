"""ScalingNote in other frameworks; each module needs the extra of its name."""
