"""States of the page: small, dark, refused, offline, partial, or with fewer options."""

import json
import re
from typing import Literal

import pytest
from playwright.sync_api import Page, expect
from served_page import MAX_QUERY_CHARS, Failing, Served

BUSY = Failing(503, "unavailable", "All searchers are busy.", retry_after=1)


def ask(page: Page, query: str = "stars") -> None:
    page.goto("/")
    page.get_by_role("searchbox", name="Query").fill(query)


def found(page: Page) -> None:
    expect(page.get_by_role("status").first).to_have_text("10 results")


TOO_WIDE = """
() => [...document.querySelectorAll("body *")]
  .filter(e => e.getBoundingClientRect().right > 361 && e.checkVisibility() && !e.closest(".spoken, .links"))
  .map(e => e.outerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.15, 0.3])
def test_a_query_typed_during_loading_is_sent(page: Page, served: Served, seconds: float) -> None:
    """The answer of /info arrives before, during or after the pause of typing that starts a search."""
    served.switches.slow["/info"] = seconds
    ask(page)
    found(page)
    expect(page.get_by_role("searchbox", name="Query")).to_have_value("stars")


def test_a_narrow_screen_never_scrolls_sideways(page: Page) -> None:
    def fits() -> None:
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360
        assert page.evaluate(TOO_WIDE) == []

    page.set_viewport_size({"width": 360, "height": 740})
    page.goto("/")
    expect(page.get_by_role("group", name="Titles to try")).to_be_visible()
    expect(page.locator("#ways dd").first).to_be_visible()
    fits()
    ask(page, "a" * 60 + " stars")
    found(page)
    fits()
    expect(page.get_by_role("checkbox", name="travel")).to_be_hidden()
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("checkbox", name="travel").check()
    expect(page.get_by_role("button", name="Filters (1)")).to_be_visible()
    fits()
    page.get_by_role("button", name="Filters (1)").click()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("region", name="Results of trigrams")).to_be_visible()
    fits()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name=re.compile("Similar documents")).first.click()
    expect(page.get_by_role("heading", level=2)).to_be_visible()
    fits()


def brightness(page: Page) -> int:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) // 3


def test_the_theme_follows_the_system_until_it_is_switched(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    ask(page)
    found(page)
    switch = page.get_by_role("button", name="Dark theme")
    expect(switch).to_have_attribute("aria-pressed", "true")
    assert brightness(page) < 40
    switch.click()
    assert brightness(page) > 220
    page.reload()
    assert brightness(page) > 220
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.click()  # equal to the system again, which the page follows from now on
    assert brightness(page) < 40
    page.emulate_media(color_scheme="light")
    assert brightness(page) > 220


CONTRASTS = """
() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = element => {
    const own = channels(getComputedStyle(element).backgroundColor);
    return own.length === 3 || own[3] === 1 ? own : ground(element.parentElement);
  };
  return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility({opacityProperty: true})
      && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
    const [a, b] = [channels(getComputedStyle(e).color), ground(e)].map(luminance).sort((x, y) => y - x);
    return [e.className || e.tagName, (a + 0.05) / (b + 0.05)];
  }).filter(([, contrast]) => contrast < 4.5);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(page: Page, served: Served, scheme: Literal["light", "dark"]) -> None:
    """WCAG 2, 1.4.3: the contrast is at least 4.5 for all elements of the page with separate colours."""
    page.emulate_media(color_scheme=scheme)
    served.switches.silent_shards = 1
    page.goto("/?q=stars&compare=words&compare=trigrams&in.topic=astronomy")
    expect(page.locator(".badge").first).to_be_visible()
    assert page.evaluate(CONTRASTS) == []
    page.goto("/")
    expect(page.locator("#ways dd").first).to_be_visible()
    assert page.evaluate(CONTRASTS) == []
    served.switches.failures.append(Failing(500, "internal", "Something broke."))
    page.goto("/?q=galaxy")
    expect(page.get_by_role("alert")).to_contain_text("Something broke.")
    assert page.evaluate(CONTRASTS) == []


def test_a_busy_server_gets_one_automatic_retry(page: Page, served: Served) -> None:
    served.switches.failures.append(BUSY)
    ask(page)
    expect(page.get_by_text("All searchers are busy. Trying once more in 1 s.")).to_be_visible()
    found(page)
    expect(page.get_by_text("busy")).to_have_count(0)


def test_after_two_busy_answers_the_user_retries(page: Page, served: Served) -> None:
    served.switches.failures.extend([BUSY, BUSY])
    ask(page)
    alert = page.get_by_role("alert").filter(has_text="All searchers are busy.")
    expect(alert).to_contain_text("Request r-17")
    expect(page.get_by_role("listitem")).to_have_count(0)
    alert.get_by_role("button", name="Try again").click()
    found(page)
    expect(alert).to_have_count(0)


def test_a_key_is_kept_for_the_tab(page: Page, served: Served) -> None:
    served.switches.api_key = "sesame"
    page.goto("/?q=stars")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Continue").click()
    expect(dialog).to_contain_text("The key was refused: this key is not known here")
    dialog.get_by_label("API key").fill("sesame")
    page.keyboard.press("Enter")
    found(page)
    expect(page.get_by_role("checkbox", name="travel")).to_be_visible()
    expect(page.locator("pre")).to_contain_text("$SCALINGNOTE_API_KEY")  # never the key
    page.reload()
    found(page)
    assert page.evaluate("localStorage.length") == 0


def test_without_storage_a_key_lasts_as_long_as_the_page(page: Page, served: Served) -> None:
    served.switches.api_key = "sesame"
    private = page.context.new_page()
    private.add_init_script("""
        for (const name of ["localStorage", "sessionStorage"]) {
          Object.defineProperty(window, name, {get() { throw new DOMException("no", "SecurityError"); }});
        }
    """)
    private.goto("/?q=stars")
    private.get_by_role("dialog", name="API key").get_by_label("API key").fill("sesame")
    private.keyboard.press("Enter")
    found(private)
    private.close()


@pytest.mark.parametrize(
    ("conditions", "filter_"),
    [
        ("min.__proto__=5", {"__proto__": {"min": 5}}),
        ("in.constructor=a", {"constructor": ["a"]}),
        ("is.topic=true&in.topic=travel&in.topic=gardens", {"topic": ["travel", "gardens"]}),
        ("in.price=1&min.price=2&max.price=9", {"price": {"min": 2, "max": 9}}),
    ],
)
def test_an_unusual_address_is_only_a_filter(
    page: Page, served: Served, conditions: str, filter_: dict[str, object]
) -> None:
    with page.expect_response("**/search"):
        page.goto(f"/?q=stars&{conditions}")
    assert served.switches.requests[-1]["filter"] == filter_
    assert page.evaluate("({}).min === undefined")


def test_a_condition_of_a_wrong_kind_can_be_replaced(page: Page) -> None:
    page.goto("/?q=stars&is.topic=true")
    page.get_by_role("checkbox", name="travel").check()
    expect(page).to_have_url(re.compile(r"in\.topic=travel$"))
    expect(page.get_by_role("status").first).to_have_text(re.compile("result"))


def test_an_error_of_a_field_is_shown_at_the_field(page: Page, served: Served) -> None:
    box = page.get_by_role("searchbox", name="Query")
    ask(page, "x" * (MAX_QUERY_CHARS + 1))
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(box).to_have_accessible_description(re.compile("has 201 characters"))
    box.fill("stars")
    found(page)
    expect(box).not_to_have_attribute("aria-invalid", "true")
    served.switches.failures.append(Failing(422, "invalid", "price ends before it begins", "filter.price"))
    page.get_by_label("price, min").fill("9")
    page.get_by_label("price, min").press("Enter")
    expect(page.get_by_label("price, min")).to_have_accessible_description("price ends before it begins")


def test_the_offline_alert_disappears_when_online(page: Page) -> None:
    ask(page)
    found(page)
    page.context.set_offline(True)
    page.get_by_role("searchbox").fill("galaxy")
    expect(page.get_by_role("alert").filter(has_text="You are offline")).to_be_visible()
    page.context.set_offline(False)
    found(page)
    expect(page.get_by_role("heading", level=3).first).to_contain_text("galax")


def test_a_partial_answer_is_marked(page: Page, served: Served) -> None:
    served.switches.silent_shards = 1
    ask(page)
    expect(page.get_by_text("1 of 2 shards answered in time: some results may be missing.")).to_be_visible()
    served.switches.silent_shards = 0
    page.get_by_role("button", name="Ask again").click()
    expect(page.get_by_text("some results may be missing")).to_have_count(0)


def test_one_column_may_fail(page: Page, served: Served) -> None:
    page.route(
        "**/search",
        lambda route: (
            route.fulfill(
                status=503, json={"error": {"code": "unavailable", "message": "Too slow.", "field": None}}
            )
            if json.loads(route.request.post_data or "{}").get("arm") == "trigrams"
            else route.continue_()
        ),
    )
    page.goto("/?q=stars&compare=words&compare=trigrams")
    expect(page.get_by_role("region", name="Results of trigrams")).to_contain_text("Too slow.")
    expect(page.get_by_role("region", name="Results of words").get_by_role("listitem")).to_have_count(10)


def test_options_that_the_server_lacks_are_hidden(page: Page, served: Served) -> None:
    arms = [{"name": "words", "tower": "words", "personalised": False}]
    served.switches.info = {"arms": arms, "fields": {}, "facets": {}}
    page.goto("/?q=stars&compare=words&compare=trigrams")
    found(page)
    for name in ("Filters", "Compare"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    expect(page.get_by_role("complementary")).to_be_hidden()
    page.keyboard.press("c")
    expect(page.get_by_role("region", name="Results", exact=True)).to_be_visible()


def test_options_of_the_server_are_sent(page: Page, served: Served) -> None:
    arms = [{"name": "words", "tower": "lookup", "personalised": True}]
    served.switches.info = {"sparse": True, "rerank": True, "arms": arms}
    ask(page)
    found(page)
    assert {"dense_weight", "rerank", "user_id", "arm"}.isdisjoint(served.switches.requests[-1])
    page.get_by_role("slider", name="Weight of embeddings against terms").press("ArrowRight")
    page.get_by_role("checkbox", name="re-rank the best").check()
    with page.expect_response("**/search"):
        page.get_by_label("Search as user").fill("ada")
        page.get_by_label("Search as user").press("Enter")
    requests = served.switches.requests[-1]
    assert (requests["dense_weight"], requests["rerank"], requests["user_id"]) == (0.55, 20, "ada")
    page.get_by_role("button", name="Reset").click()
    expect(page.get_by_text("as the index was tuned")).to_be_visible()
