"""Why a request is not answered: a status, a code for programs, a message for people."""


class RefusedError(Exception):
    """Raised anywhere in the gateway; the client gets it as :class:`~serve.messages.Refusal`."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.field, self.retry_after_s = field, retry_after_s


def invalid(message: str, field: str | None = None) -> RefusedError:
    """The request cannot be answered by anyone: 422."""
    return RefusedError(422, "invalid", message, field)


def not_found(message: str) -> RefusedError:
    """404."""
    return RefusedError(404, "not_found", message)


def conflict(message: str) -> RefusedError:
    """This server, as it is set up, does not do that: 409."""
    return RefusedError(409, "conflict", message)


def unavailable(message: str) -> RefusedError:
    """Not now: 503."""
    return RefusedError(503, "unavailable", message, retry_after_s=1)
