"""The fuzzer of the service's OpenAPI, with an application that has a fault of each kind."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StrictInt

from benchmarks import api_fuzz

# Hypothesis attributes the random numbers of the server's thread to its example.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: StrictInt


class Answer(BaseModel):
    number: int


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    application = FastAPI()

    @application.post("/right")
    def right(body: Body) -> Answer:
        return Answer(number=body.number)

    @application.post("/fails")
    def fails(body: Body) -> Answer:
        return Response(status_code=500)  # type: ignore[return-value]

    @application.post("/teapot")
    def teapot(body: Body) -> Answer:
        return JSONResponse({"number": 1}, 418)  # type: ignore[return-value]

    @application.post("/other", response_model=Answer)
    def other(body: Body) -> Response:
        return JSONResponse({"name": 1})

    @application.post("/anything", response_model=Answer, openapi_extra=described())
    def anything() -> Response:
        return JSONResponse({"number": 1})

    server = uvicorn.Server(uvicorn.Config(application, port=0, ws="none", log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def described() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def test_each_kind_of_fault_is_counted_where_it_is(url: str):
    rows, faults = api_fuzz.fuzz(url, "a model", examples=3)
    counted_faults = {(fault["metric"], fault["operation"]) for fault in faults}
    assert "POST /right" not in {operation for _, operation in counted_faults}
    assert counted_faults >= {
        ("server_errors", "POST /fails"),
        ("undocumented_statuses", "POST /fails"),
        ("undocumented_statuses", "POST /teapot"),
        ("undocumented_bodies", "POST /other"),
        ("accepted_invalid", "POST /anything"),
    }
    assert [row["operation"] for row in rows] == [
        f"POST /{name}" for name in ("anything", "fails", "other", "right", "teapot")
    ]
    assert all(row["cases"] > 5 for row in rows)
