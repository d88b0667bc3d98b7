"""Where documents, queries and judgements come from: readers, the registry, the click simulator."""
