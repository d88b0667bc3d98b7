"""Pseudo-queries: texts drawn from documents, which a teacher encodes in place of users' queries."""
