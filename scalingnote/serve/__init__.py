"""Ray Serve applications: gateway, query encoder, index shards, search page."""
