"""Vectors of a run in a vector database of the user's own."""
