"""Files on disk: artifacts and their manifests, table schemas, TREC files."""
