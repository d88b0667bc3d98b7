"""Actions of a user: search, filter, compare, find similar documents, by mouse and by keyboard."""

import re
from typing import Any
from urllib.parse import quote

from page_corpus import DOCUMENTS, MARKUP
from playwright.sync_api import Locator, Page, expect
from served_page import Served


def ask(page: Page, query: str, address: str = "/") -> None:
    page.goto(address)
    page.get_by_role("searchbox", name="Query").fill(query)
    expect(page.get_by_role("status").first).to_have_text(re.compile("result"))


def titles(within: Page | Locator) -> list[str]:
    return within.get_by_role("heading", level=3).all_inner_texts()


def best(served: Served, query: str, *, tower: str = "words", k: int = 10, where: Any = None) -> list[str]:
    """Find the expected titles with the searcher."""
    index = served.index
    hits = index.searcher.search(index.towers[tower](query)[None], k=k, where=where)[0]
    return [hit.document["title"] for hit in hits]


def test_results_come_while_typing(page: Page, served: Served) -> None:
    page.goto("/")
    box = page.get_by_role("searchbox", name="Query")
    expect(box).to_be_focused()
    box.press_sequentially("stars", delay=10)
    expect(page.get_by_role("status").first).to_have_text("10 results")
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "stars"))
    expect(page).to_have_url(re.compile(r"\?q=stars$"))
    expect(page).to_have_title("stars · ScalingNote")
    expect(page.locator("#timings")).to_contain_text(re.compile(r"[\d.]+ ms"))
    assert len([a for a in served.switches.requests if "query" in a]) < 5  # not one per letter
    page.go_back()
    expect(box).to_have_value("")
    expect(page.get_by_role("listitem")).to_have_count(0)
    page.go_forward()
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "stars"))


def test_an_address_restores_a_search(page: Page, served: Served) -> None:
    page.goto("/?q=stars&k=5&in.topic=travel&in.topic=gardens&max.price=60&is.in_stock=true&arm=trigrams")
    where = {"topic": ["travel", "gardens"], "price": {"max": 60}, "in_stock": True}
    expected = best(served, "stars", tower="trigrams", k=5, where=where)
    expect(page.get_by_role("heading", level=3)).to_have_text(expected)
    chips = page.get_by_role("group", name="Filters in use").get_by_role("button")
    expect(chips).to_have_text([re.compile(t) for t in ("travel", "gardens", "up to 60", "in stock: yes")])
    expect(page.get_by_label("Query tower")).to_have_value("trigrams")


def test_an_older_answer_never_replaces_a_newer_one(page: Page, served: Served) -> None:
    served.switches.slow = {"tomato": 0.6}
    page.goto("/")
    box = page.get_by_role("searchbox", name="Query")
    with page.expect_request(lambda r: r.url.endswith("/search") and "tomato" in (r.post_data or "")):
        box.fill("tomato")
    box.fill("telescopes")
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "telescopes"))
    page.wait_for_timeout(800)
    assert titles(page) == best(served, "telescopes")


def test_words_of_the_query_are_marked_in_every_script(page: Page) -> None:
    expected = {
        "creme BRULEE": {"Crème", "brûlée"},
        "CAFÉ, please": {"Cafés", "café"},
        "北京的天气": {"北京的天气", "北京", "的天气"},
        "what is the sun": {"sun", "Sun"},  # not every "the"
        "galaxy": {"galaxy"},
        "sta": set(),  # not a word
    }
    for query, marked in expected.items():
        page.goto(f"/?k=40&q={quote(query)}")
        expect(page.get_by_role("listitem")).to_have_count(24)
        assert set(page.locator("mark").all_inner_texts()) == marked


def test_a_title_that_is_markup_stays_text(page: Page) -> None:
    ask(page, "a title that is markup")
    expect(page.get_by_role("heading", level=3).first).to_have_text(MARKUP)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("s")
    expect(page.get_by_role("heading", name=f"Similar to {MARKUP}")).to_be_visible()
    assert page.evaluate("window.broken") is None
    assert not page.locator("main img").count()


def test_filters_by_topic_range_and_flag(page: Page, served: Served) -> None:
    ask(page, "stars")
    astronomy = page.get_by_role("checkbox", name="astronomy")
    expect(page.locator("label", has=astronomy)).to_have_text(re.compile("astronomy.*6"))
    astronomy.check()
    expect(page.get_by_role("heading", level=3)).to_have_text(
        best(served, "stars", where={"topic": "astronomy"})
    )
    page.get_by_role("checkbox", name="cooking").check()
    page.get_by_label("price, min").fill("5")
    page.get_by_label("price, max").fill("30")
    page.get_by_label("price, max").press("Enter")
    page.get_by_label("in stock").select_option("yes")
    where = {"topic": ["astronomy", "cooking"], "price": {"min": 5, "max": 30}, "in_stock": True}
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "stars", where=where))
    page.get_by_role("button", name="topic: astronomy").click()
    expect(astronomy).not_to_be_checked()
    expect(page).to_have_url(re.compile("in.topic=cooking&min.price=5&max.price=30&is.in_stock=true"))
    page.get_by_label("price, min").fill("500")
    page.get_by_label("price, max").fill("600")
    page.get_by_label("price, max").press("Enter")
    page.get_by_role("button", name="Remove all filters").click()
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "stars"))


def test_two_query_towers_side_by_side(page: Page, served: Served) -> None:
    ask(page, "stars at night")
    page.get_by_role("button", name="Compare").click()
    sides = {name: best(served, "stars at night", tower=name) for name in ("words", "trigrams")}
    columns = {name: page.get_by_role("region", name=f"Results of {name}") for name in sides}
    for (name, column), other in zip(columns.items(), reversed(sides.values()), strict=True):
        expect(column.get_by_role("heading", level=3)).to_have_text(sides[name])
        moves = [there.index(t) - at if t in (there := other) else None for at, t in enumerate(sides[name])]
        signs = [
            "only here" if by is None else "=" if not by else f"{'↑' if by > 0 else '↓'}{abs(by)}"
            for by in moves
        ]
        expect(column.locator(".badge")).to_have_text([re.compile(f"^{sign}") for sign in signs])
    shared = set(sides["words"]) & set(sides["trigrams"])
    assert 0 < len(shared) < 10
    expect(page.get_by_role("status").first).to_contain_text(f"{len(shared)} of 10 documents in both")
    expect(page.locator(".links path")).to_have_count(len(shared))

    # The arrow moves to the same document in the other column, and both are marked.
    title = next(title for title in sides["words"] if title in shared)
    columns["words"].get_by_role("button", name=title, exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(columns["trigrams"].get_by_role("button", name=title, exact=True)).to_be_focused()
    expect(page.locator(".card.pointed")).to_have_count(2)

    page.get_by_label("Column on the right").select_option("words")
    expect(page.locator(".badge.same")).to_have_count(20)
    page.reload()
    expect(page.locator(".badge.same")).to_have_count(20)
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="Results", exact=True)).to_be_visible()


def ways(served: Served) -> None:
    """Set one tower, a table, over documents with terms, like the default of `scalingnote serve`."""
    arm = {"name": "words", "tower": "lookup", "personalised": False}
    served.switches.info = {"arms": [arm], "sparse": True}


def test_one_tower_is_compared_with_words(page: Page, served: Served) -> None:
    ways(served)
    ask(page, "stars")
    page.get_by_role("button", name="Compare").click()
    for name in ("table + BM25", "BM25 alone"):
        expect(page.get_by_role("region", name=f"Results of {name}").get_by_role("listitem")).to_have_count(
            10
        )
    hybrid, words = sorted(served.switches.requests[-2:], key=lambda requests: "dense_weight" in requests)
    assert (hybrid["arm"], "dense_weight" in hybrid) == ("words", False)
    assert (words["dense_weight"], "arm" in words) == (0, False)
    page.get_by_label("Column on the left").select_option("table alone")
    expect(page.get_by_role("region", name="Results of table alone")).to_be_visible()
    table_only = {"arm": "words", "dense_weight": 1}
    assert any(table_only.items() <= requests.items() for requests in served.switches.requests[-2:])
    expect(page.locator(".badge").first).to_have_attribute("title", re.compile("BM25 alone|table alone"))
    page.reload()  # the address has all settings
    expect(page.get_by_role("region", name="Results of table alone")).to_be_visible()
    expect(page.get_by_label("Column on the right")).to_have_value(":words")


def test_the_start_page_explains_the_ways_of_search(page: Page, served: Served) -> None:
    page.goto("/")
    terms = page.locator("#ways dt")
    expect(terms).to_have_text(["Teacher", "Transformer", "Compare"])
    expect(page.locator("#ways")).to_contain_text(
        "side by side, with what they have in common: words and trigrams."
    )
    ways(served)
    page.reload()
    expect(terms).to_have_text(["Teacher", "Table", "BM25", "Hybrid", "Compare"])
    expect(page.locator("#ways")).to_contain_text("table + BM25, table alone and BM25 alone.")
    page.get_by_role("searchbox").fill("stars")
    expect(page.locator("#ways")).to_be_hidden()


def test_similar_documents_are_shown_and_left_again(page: Page) -> None:
    ask(page, "galaxy")
    before = titles(page)
    page.get_by_role("listitem").nth(1).hover()
    page.get_by_role("button", name=f"Similar documents to {before[1]}").click()
    expect(page.get_by_role("heading", level=2, name=f"Similar to {before[1]}")).to_be_visible()
    # Until the answer arrives, the page still shows the ten results of the query.
    expect(page.get_by_role("heading", level=3, name=before[1], exact=True)).to_have_count(0)
    expect(page.get_by_role("status").first).to_have_text("10 results")
    page.reload()  # the title is read from the document
    expect(page.get_by_role("heading", level=2, name=f"Similar to {before[1]}")).to_be_visible()
    page.get_by_role("button", name="Back to results").click()
    expect(page.get_by_role("heading", level=3)).to_have_text(before)
    expect(page.get_by_role("button", name=before[1], exact=True)).to_be_focused()


def test_the_page_works_by_keyboard(page: Page) -> None:
    ask(page, "galaxy")
    results = titles(page)
    box = page.get_by_role("searchbox", name="Query")

    def title(at: int) -> Locator:
        return page.get_by_role("heading", level=3).nth(at).get_by_role("button")

    page.keyboard.press("ArrowDown")
    expect(title(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(title(1)).to_have_attribute("aria-expanded", "true")
    item = page.get_by_role("listitem").nth(1)
    expect(item).to_contain_text("semantic ID")
    expect(item).to_contain_text("in stock")
    page.keyboard.press("Escape")
    expect(title(1)).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("s")
    expect(page.get_by_role("heading", level=2, name=f"Similar to {results[1]}")).to_be_visible()
    expect(title(0)).to_be_focused()
    page.keyboard.press("Escape")
    expect(title(1)).to_be_focused()
    expect(title(1)).to_have_text(results[1])
    page.keyboard.press("c")
    expect(page.get_by_role("region", name="Results of trigrams")).to_be_visible()
    page.keyboard.press("c")
    expect(page.get_by_role("region", name="Results", exact=True)).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    expect(box).to_be_focused()
    page.keyboard.type("c?s/")  # these are letters in the box
    expect(box).to_have_value("c?s/")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_start_page_offers_titles_of_the_index(page: Page) -> None:
    page.goto("/")
    offered = page.get_by_role("group", name="Titles to try").get_by_role("button")
    expect(offered).to_have_count(3)
    title = offered.first.inner_text()
    assert title in {document["title"] for document in DOCUMENTS}
    offered.first.click()
    expect(page.get_by_role("searchbox")).to_have_value(title)
    expect(page.get_by_role("heading", level=3).first).to_have_text(title)


def test_more_results_and_a_command_for_the_shell(page: Page, served: Served) -> None:
    ask(page, "it's the stars")
    page.get_by_role("button", name="More results").click()
    expect(page.get_by_role("heading", level=3)).to_have_text(best(served, "it's the stars", k=20))
    expect(page.get_by_role("heading", level=3).nth(10).get_by_role("button")).to_be_focused()
    page.get_by_text("As a request").click()
    expect(page.locator("pre")).to_contain_text(r"""-d '{"query":"it'\''s the stars","k":20""")
