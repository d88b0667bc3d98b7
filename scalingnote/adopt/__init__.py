"""Published embedding models taken as they are: a dual encoder without training."""
