"""Online experiments: the split of traffic between arms, access logs, and the comparison of the arms."""
