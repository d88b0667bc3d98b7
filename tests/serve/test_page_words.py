"""The search page marks the words that the command line marks, in every script."""

import json
import subprocess
import unicodedata
from importlib import resources

import pytest
from playwright._impl._driver import compute_driver_executable

from scalingnote.cli.terminal import highlight

JAMO = unicodedata.normalize("NFD", "한국어")
CASES = [
    ("दान", "दान दिन दाना", "<दान> दिन दाना"),
    ("ọ̀rọ̀", "ọ̀rọ̀ ọmọ", "<ọ̀rọ̀> ọmọ"),
    ("தமிழ்", "தமிழ் மொழி", "<தமிழ்> மொழி"),
    ("กำลัง", "ไทยกำลังไป", "ไทย<กำลัง>ไป"),
    ("ကျောင်း", "ကျောင်းသား", "<ကျောင်း>သား"),
    ("ភាសា", "ភាសាខ្មែរ", "<ភាសា>ខ្មែរ"),
    ("๑๒", "๑๒ ก๑๒", "<๑๒> ก<๑๒>"),
    ("北京的天气", "北京春天的天气", "<北京>春天<的天气>"),
    ("ガギグ", "ｶﾞｷﾞｸﾞ x", "<ｶﾞｷﾞｸﾞ> x"),
    ("한국어", f"{JAMO}를", f"<{JAMO}>를"),
    ("שלום", "שָׁלוֹם עולם", "<שָׁלוֹם> עולם"),
    ("محمد", "مُحَمَّدٌ آب", "<مُحَمَّدٌ> آب"),
    ("اب", "آب", "آب"),
    ("catalog", "cata\u00adlog cat", "<cata\u00adlog> cat"),
    ("λόγος", "ΛΌΓΟΣ", "<ΛΌΓΟΣ>"),
    ("strasse", "Straße", "<Straße>"),
    ("istanbul", "İstanbul", "<İstanbul>"),
    ("what is the sun", "the sun", "the <sun>"),
    ("to be", "To be or not to be", "<To> <be> or not <to> <be>"),  # only function words
    ("Attack", "attacks, attack", "<attacks>, <attack>"),
    ("star", "star starting", "<star> starting"),
    ("x", "café", "café"),
    ("key", "", ""),
]  # fmt: skip
# This runs the module of the page in playwright's node. A fragment is a list of strings and elements.
PROGRAM = """
globalThis.document = {
  createDocumentFragment: () => Object.assign([], {append(...more) { this.push(...more); }}),
  createElement: () => ({}),
};
const shown = part => part.textContent ? `<${part.textContent}>` : part;
const {code, cases} = JSON.parse(require("fs").readFileSync(0, "utf8"));
import("data:text/javascript," + encodeURIComponent(code)).then(({highlighter}) => console.log(JSON.stringify(
  cases.map(([query, text]) => highlighter(query)(text).map(shown).join("")))));
"""


@pytest.fixture(scope="module")
def on_the_page() -> list[str]:
    code = (resources.files("scalingnote.serve") / "page/highlight.js").read_text(encoding="utf-8")
    node = compute_driver_executable()[0]
    data = json.dumps({"code": code, "cases": CASES})
    process = subprocess.run([node, "-e", PROGRAM], input=data, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[query for query, _, _ in CASES])
def test_whole_words_are_marked(number: int, on_the_page: list[str]):
    query, text, expected = CASES[number]
    marked = (f"<{piece}>" if is_word else piece for piece, is_word in highlight(text, query))
    assert "".join(marked) == expected
    assert on_the_page[number] == expected
