"""New documents on their way to the index: the steps of the offline stages, for one document or a million."""
