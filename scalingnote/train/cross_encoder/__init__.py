"""A teacher that reads a query and a document together, made so that a dual encoder can learn from it."""
