"""Queries to results over the shards of an index."""
