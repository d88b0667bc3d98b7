"""The query planner: how important each word of a query is."""
