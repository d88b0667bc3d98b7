"""What ``serve run`` and Serve's config files import from a checkout."""
