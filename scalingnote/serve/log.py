"""The logger of replicas: what it is told lands in the replica's own log file, beside what Serve says.

Serve runs at level WARNING here: below it, it makes up a line for each request, written or not, which takes a
twentieth of a search. What the gateway writes of requests is ``serve.access_log``.
"""

import logging

from ray.serve.schema import LoggingConfig

SERVE = LoggingConfig(log_level="WARNING", enable_access_log=False)


def get_logger() -> logging.Logger:
    """Told from INFO on, whatever the level of Serve's own."""
    logger = logging.getLogger("ray.serve.scalingnote")
    logger.setLevel(logging.INFO)
    return logger
