"""One browser, page and server per file of tests, reset for each test."""

import shutil
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    # Ray declares fields in a deprecated form of pydantic, and warnings are errors here.
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
expect.set_options(timeout=30_000)  # for a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running(build(DOCUMENTS, fields=["price", "in_stock"], width=256, shards=2)) as served:
        yield served


# The scope is not the session: while Playwright runs, this process cannot start another event loop. It is
# not the function: a window takes a second of processor time, a test in it a tenth.
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
    """Return the server with all switches at their defaults."""
    server.switches = Switches()
    return server


@pytest.fixture
def page(window: Page, served: Served) -> Iterator[Page]:
    """Yield a page, and check that its scripts and its Content-Security-Policy log no errors."""
    window.set_viewport_size(DESK)
    window.emulate_media(color_scheme="light")
    window.goto("/page/icon.svg")  # has the same origin, and no scripts that could write again
    window.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    errors: list[str] = []

    # The browser logs each answer with an error status, which some tests cause.
    def logged(kind: str, text: str) -> None:
        if kind == "error" and not text.startswith("Failed to load resource"):
            errors.append(text)

    listeners = {
        "pageerror": lambda error: errors.append(str(error)),
        "console": lambda message: logged(message.type, message.text),
    }
    for event, listener in listeners.items():
        window.on(event, listener)
    yield window
    window.unroute_all()
    window.context.set_offline(False)
    for event, listener in listeners.items():
        window.remove_listener(event, listener)
    assert not errors
