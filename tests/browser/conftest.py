"""One browser, page and server for each file of tests, as good as new for each test."""

import shutil
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    # Ray declares fields in a way that pydantic deprecates, and warnings are errors here.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401

from page_corpus import DOCUMENTS
from playwright.sync_api import Page, expect, sync_playwright
from served_page import Served, Switches, running
from small_index import build

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESK = {"width": 1280, "height": 800}
expect.set_options(timeout=30_000)  # a busy machine is no failure


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running(build(DOCUMENTS, fields=["price", "in_stock"], width=256, shards=2)) as served:
        yield served


# Not for the session: while Playwright runs, this process can start no other event loop. Not for the
# test: a window costs a second of processor time, a test in it a tenth.
@pytest.fixture(scope="module")
def window(server: Served) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip(
            "no chromium on PATH: the page is tested in a real browser (Debian: apt install chromium)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(base_url=server.url).new_page()
        page.set_default_timeout(30_000)
        yield page
        browser.close()


@pytest.fixture
def served(server: Served) -> Served:
    """The server, doing everything right."""
    server.switches = Switches()
    return server


@pytest.fixture
def page(window: Page, served: Served) -> Iterator[Page]:
    """A page that must not log an error: neither of its scripts nor of its Content-Security-Policy."""
    window.set_viewport_size(DESK)
    window.emulate_media(color_scheme="light")
    window.goto("/page/icon.svg")  # of the same origin, and without scripts that could write again
    window.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    errors: list[str] = []

    # The browser itself notes every answer that is an error: those are what some tests are about.
    def logged(kind: str, text: str) -> None:
        if kind == "error" and not text.startswith("Failed to load resource"):
            errors.append(text)

    listeners = {
        "pageerror": lambda error: errors.append(str(error)),
        "console": lambda said: logged(said.type, said.text),
    }
    for event, listener in listeners.items():
        window.on(event, listener)
    yield window
    window.unroute_all()
    window.context.set_offline(False)
    for event, listener in listeners.items():
        window.remove_listener(event, listener)
    assert not errors
