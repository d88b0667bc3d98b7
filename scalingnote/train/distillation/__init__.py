"""Stage II: a cheap query tower learns to reproduce the teacher's query embeddings."""
