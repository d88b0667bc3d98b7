"""Export of the vectors of a run to a vector database of the user."""
