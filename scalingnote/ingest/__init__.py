"""New documents for an index: the steps of the offline stages, for one document or a million."""
