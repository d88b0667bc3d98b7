"""gRPC beside HTTP: the same requests, answers and refusals."""
