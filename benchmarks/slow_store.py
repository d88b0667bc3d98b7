"""A local S3 server that takes its time and counts: each request waits, then moto answers it.

    python -m benchmarks.slow_store PORT SECONDS

``GET /requests`` answers with the number of requests by method since the last time it was asked.
"""

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any


def main() -> None:
    """Serve until the process is ended."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port, delay = int(sys.argv[1]), float(sys.argv[2])
    store = DomainDispatcherApplication(create_backend_app)
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with lock:
            if environ["PATH_INFO"] == "/requests":
                body = json.dumps(counts).encode()
                counts.clear()
                start("200 OK", [("Content-Type", "application/json")])
                return [body]
            counts[environ["REQUEST_METHOD"]] += 1
        time.sleep(delay)
        found: Iterable[bytes] = store(environ, start)
        return found

    make_server("127.0.0.1", port, answer, threaded=True).serve_forever()


if __name__ == "__main__":
    main()
