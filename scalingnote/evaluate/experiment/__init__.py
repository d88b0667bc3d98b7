"""Online experiments: traffic split between arms, their requests logged, and the arms compared."""
