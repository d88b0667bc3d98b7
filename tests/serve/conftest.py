"""Imports Ray Serve where its warnings do no harm."""

import warnings

with warnings.catch_warnings():
    # Ray declares fields in a way that pydantic deprecates, and warnings are errors here.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
