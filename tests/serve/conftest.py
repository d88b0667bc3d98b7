"""Makes `serve` the package and not this directory, and imports Ray Serve where its warnings do no harm."""

import sys
import warnings
from pathlib import Path

# pytest puts tests/ on the path, where this very directory answers to the name `serve`.
sys.path.insert(0, str(Path(__file__).parents[2]))

with warnings.catch_warnings():
    # Ray declares fields in a way that pydantic deprecates, and warnings are errors here.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
