"""Imports for ``serve run`` and Serve's config files in a checkout."""
