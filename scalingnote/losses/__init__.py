"""Training objectives: pure functions of tensors, each a numbered equation of a paper."""
