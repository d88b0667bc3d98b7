"""The index: shards that share one quantizer, built from embeddings and searched together."""
