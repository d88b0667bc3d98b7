"""Towers: a backbone, the prompt it reads, the state that is pooled, the projection to an embedding."""
