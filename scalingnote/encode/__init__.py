"""Embeddings of texts, offline for millions of documents and online for one query."""
