"""A run: its config, the table of stages, the pipeline of them, new documents, a finished run opened."""
