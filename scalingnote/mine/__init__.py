"""From a trained dual encoder, or any run, to fresh hard negatives for another round of stage I."""
