"""Hard negatives for another round of stage I, mined by a dual encoder or from run files."""
