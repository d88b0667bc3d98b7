"""Knobs of the service; what they turn lies in serve/, beside this package."""
