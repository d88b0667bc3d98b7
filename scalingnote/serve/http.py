"""HTTP below the paths: routes that read a body fast, responses, refusals, and what every application has.

Responses are written as they are: the models describe them to OpenAPI, and validating every response against
its model would take as long as a search.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from scalingnote.serve.access import (
    AccessMiddleware,
    Admission,
    RefusedError,
    RequestCallback,
    invalid,
    refusal,
    validation_refusal,
)
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve_config import ServeConfig

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
log = get_logger()


def guard(
    api: "Api",
    config: ServeConfig,
    *,
    admission: Admission | None,
    on_done: RequestCallback | None,
    in_serve: bool,
) -> None:
    """Put admission, the fast routes and CORS before an application that has all its routes.

    Args:
        api: the application.
        config: limits and CORS.
        admission: shared with the gRPC side; None: one of `config`, without API keys.
        on_done: called for each request after its answer.
        in_serve: Ray Serve adds the request id to answers.
    """
    api.exception_handler(RefusedError)(_on_refused)
    api.exception_handler(RequestValidationError)(_on_validation_error)
    api.exception_handler(HTTPException)(_on_http_exception)
    api.exception_handler(Exception)(_on_exception)
    admission = admission or Admission(config.limits, is_open=config.allow_unauthenticated)
    api.entry = AccessMiddleware(
        _BodyRouter(api.entry, api=api), admission=admission, on_done=on_done, in_serve=in_serve
    )
    if config.cors_origins:
        api.entry = CORSMiddleware(
            api.entry,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )


# --- body routes ------------------------------------------------------------------------------------------


# FastAPI parses a body to Python values and those to the model, resolves dependencies and enters exit stacks,
# behind several middlewares: 77 us for a /search whose service answers at once, against 15 us by a body route
# (33 us with FastAPI's middlewares alone).
# The routes of searches therefore validate the bytes of the body directly, in front of FastAPI. They are
# FastAPI routes nevertheless, so OpenAPI describes them like the others.


class Api(FastAPI):
    """A FastAPI application with layers of its own in front of FastAPI's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.entry: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.entry(scope, receive, send)


class _BodyRoute(APIRoute):
    """A route whose handler takes (body) or (body, request), with the body as its pydantic model."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's hook, called once: the function that answers a request."""
        parameters = list(inspect.signature(self.endpoint).parameters.values())
        self._model, self._takes_request = parameters[0].annotation, len(parameters) > 1
        return self.answer

    async def answer(self, request: Request) -> Any:
        """The handler's response; RefusedError when the body is not valid."""
        try:
            body = self._model.model_validate_json(await request.body())
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            if problems[0]["type"] == "json_invalid":
                raise invalid(f"the body is no JSON: {problems[0]['ctx']['error']}") from None
            raise validation_refusal(problems) from None
        except ClientDisconnect:
            raise RefusedError(400, "invalid", "the body ended early") from None
        return await (self.endpoint(body, request) if self._takes_request else self.endpoint(body))


class _BodyRouter:
    """ASGI middleware: body routes are answered here, all other requests by `app`.

    `api` must have all its routes and exception handlers already.
    """

    def __init__(self, app: ASGIApp, *, api: FastAPI) -> None:
        self._app, self._exception_handlers = app, api.exception_handlers
        self._routes = {route.path: route for route in api.routes if isinstance(route, _BodyRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except Exception as error:
            handlers = self._exception_handlers
            handle: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
            response = await handle(request, error)
        await response(scope, receive, send)


def post(api: FastAPI, path: str, *, response: Any, responses: Any = None) -> Callable[[Handler], Handler]:
    """Decorator of the handler of a body route ``POST path``; `response` is its model for OpenAPI.

    `responses` are the models of other statuses, where they are not those of every path.
    """

    def add(handler: Handler) -> Handler:
        api.router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=response,
            responses=responses,
            route_class_override=_BodyRoute,
        )
        return handler

    return add


# --- responses and errors ---------------------------------------------------------------------------------


def json_response(content: Any, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(to_json(content), status, media_type="application/json")


def _refusal(request: Request, refused: RefusedError) -> Response:
    request.state.refused = refused.code
    status, body = refusal(refused, request.state.request_id, request.scope["path"])
    response = json_response(body, status)
    if refused.retry_after_s is not None:
        response.headers["retry-after"] = str(refused.retry_after_s)
    return response


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # without "body"
    if problems[0]["type"] == "json_invalid":
        (position,), reason = problems[0]["loc"], problems[0]["ctx"]["error"]
        return _refusal(request, invalid(f"the body is no JSON: {reason} (character {position})"))
    return _refusal(request, validation_refusal(problems))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "refused")
    response = _refusal(request, RefusedError(error.status_code, code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _on_exception(request: Request, error: Exception) -> Response:
    log.error("request %s failed", request.state.request_id, exc_info=error)
    return _refusal(request, RefusedError(500, "internal", "this is a fault of the server: see its log"))
