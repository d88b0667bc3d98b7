"""Hard negatives for another round of stage I, mined with a dual encoder or from run files."""
