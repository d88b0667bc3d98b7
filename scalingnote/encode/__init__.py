"""Text to embeddings, offline over millions of documents and online for one query."""
