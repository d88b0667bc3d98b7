"""Pseudo-queries: texts drawn from documents, which a teacher encodes as if users had asked them."""
