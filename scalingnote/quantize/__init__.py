"""Semantic IDs of embeddings by residual K-means."""
