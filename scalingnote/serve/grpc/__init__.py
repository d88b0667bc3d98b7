"""gRPC next to HTTP: the same requests, answers and refusals."""
