"""Embeddings and everything else known of documents, queries and users, merged into the final embeddings."""
