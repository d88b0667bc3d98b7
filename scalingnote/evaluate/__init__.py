"""Evaluation of retrieval: test queries, measures, significance and reports."""
