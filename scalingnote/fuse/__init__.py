"""Fusion: features of documents, queries and users are merged into the final embeddings."""
