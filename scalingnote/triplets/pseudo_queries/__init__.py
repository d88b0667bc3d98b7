"""Pseudo-queries: texts drawn from documents that a teacher encodes instead of queries of users."""
