"""Screenshots of the search page over MedQuAD, whose documents are downloaded where they are not at hand.

python tests/browser/screenshots.py docs/screenshots
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, Route, sync_playwright

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from chromium import launch  # noqa: E402
from served_page import running  # noqa: E402
from small_index import SmallIndex, build  # noqa: E402

from scalingnote.datasets import sources  # noqa: E402
from scalingnote.datasets.config import MedQuad  # noqa: E402

QUERY = "symptoms of kidney failure in diabetes"
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 1.5,
}
DARK = {"color_scheme": "dark"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--documents", type=int, default=4000, help="default: %(default)s")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with running(medquad(options.documents)) as served, sync_playwright() as playwright:
        browser = launch(playwright)
        for name, (setting, act) in SHOTS.items():
            page = browser.new_context(**setting).new_page()
            page.goto(served.url)
            act(page)
            page.wait_for_function("document.getAnimations().length === 0")
            target = options.folder / f"{name}.png"
            # In 128 colours: a third of the bytes, and no eye sees it.
            Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(128, dither=0).save(
                target, optimize=True
            )
            page.context.close()
            print(target, f"{target.stat().st_size / 1000:.0f} kB")
        browser.close()


def medquad(documents: int) -> SmallIndex:
    """Every so many answers, with the collection they come from as a second field."""
    rows = [row for row in sources.read(MedQuad()).documents if isinstance(row, dict)]
    step = max(1, len(rows) // documents)
    chosen = [row | {"collection": row["doc_id"].split("/")[0].split("_")[1]} for row in rows[::step]]
    return build(chosen, fields=["collection"], width=2048, shards=4)


def start(page: Page) -> None:
    page.get_by_role("group", name="Titles to try").wait_for()
    page.evaluate("document.activeElement.blur()")


def search(page: Page, *, then: Callable[[Page], None] | None = None) -> None:
    page.get_by_label("Query", exact=True).fill(QUERY)
    page.get_by_role("listitem").first.wait_for()
    if then:
        then(page)


def walk(page: Page) -> None:
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")


def compare(page: Page) -> None:
    walk(page)
    page.keyboard.press("c")
    page.locator(".links path").first.wait_for(state="attached")


def filtered(page: Page) -> None:
    page.get_by_label("symptoms").check()
    page.get_by_role("button", name="topic: symptoms").wait_for()
    page.keyboard.press("/")
    walk(page)
    page.keyboard.press("Enter")


def busy(page: Page) -> None:
    def refuse(route: Route) -> None:
        message = "All searchers are busy: come back in a moment."
        error = {"code": "unavailable", "message": message, "field": None}
        route.fulfill(status=503, json={"error": error, "request_id": "7d1fd0a4"})

    page.route("**/search", refuse)
    page.get_by_label("Query", exact=True).fill(QUERY)
    page.get_by_role("alert").get_by_text("busy").wait_for()


SHOTS: dict[str, tuple[dict[str, Any], Callable[[Page], None]]] = {
    "start": (DESKTOP, start),
    "light": (DESKTOP, partial(search, then=walk)),
    "dark": (DESKTOP | DARK, partial(search, then=filtered)),
    "compare": (DESKTOP, partial(search, then=compare)),
    "start-dark": (DESKTOP | DARK, start),
    "phone-start": (PHONE, start),
    "phone": (PHONE, search),
    "phone-dark": (PHONE | DARK, partial(search, then=compare)),
    "error": (DESKTOP, busy),
}

if __name__ == "__main__":
    main()
