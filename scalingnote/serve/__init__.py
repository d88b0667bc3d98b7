"""The Ray Serve application: gateway, query encoders, index searchers, writer, and the search page."""
