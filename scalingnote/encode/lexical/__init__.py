"""BM25 as sparse vectors: weighted words of documents, for hybrid search with any dual encoder."""
