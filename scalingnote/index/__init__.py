"""Embeddings to shards of an IVFPQ index that share one quantizer."""
