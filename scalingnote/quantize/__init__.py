"""Embeddings to semantic IDs by residual K-means."""
