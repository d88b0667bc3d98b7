"""BM25 as sparse vectors: weighted words of documents, for hybrid search beside any dual encoder."""
