"""A teacher that reads a query and a document together, built so that a dual encoder can learn from it."""
