"""Live updates: documents are written and deleted while an index is searched."""
