"""The query planner: the importance of each word of a query."""
