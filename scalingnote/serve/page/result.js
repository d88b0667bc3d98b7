// One result: the document, its scores, and its actions.

import {element, spoken} from "./element.js";

// These are shown elsewhere on the card, or are not fields of the document.
const OWN = new Set(["doc_id", "score", "title", "topic", "snippet", "semantic_id", "explain"]);
let cards = 0;

/**
 * Create a list item for a result. `mark` highlights text, `best` is the first score of the list; `badge` (compare)
 * and `onSimilar` may be null. The title is a button: arrow keys move from title to title, Enter opens it.
 */
export function card(result, {rank, best, mark, badge, onSimilar}) {
  const id = `result-${++cards}`;
  const title = element("button", {
    type: "button", className: "title", "aria-expanded": "false", "aria-controls": id,
  }, mark(result.title || result.doc_id));
  const more = element("dl", {id, className: "more", hidden: true});
  title.addEventListener("click", () => {
    const opens = more.hidden;
    if (opens && !more.children.length) more.append(...details(result));
    more.hidden = !opens;
    item.classList.toggle("open", opens);
    title.setAttribute("aria-expanded", opens);
  });
  const similar = onSimilar && element("button", {
    type: "button", className: "similar", title: "Documents similar to this one (s)",
  }, "Similar", spoken(` documents to ${result.title || result.doc_id}`));
  similar?.addEventListener("click", () => onSimilar(result));
  const item = element("li", {className: "card", "data-doc": result.doc_id},
    element("span", {className: "rank", "aria-hidden": "true"}, String(rank)),
    element("div", {className: "body"},
      element("div", {className: "headline"}, element("h3", {}, title), badge),
      result.snippet ? element("p", {className: "snippet"}, mark(result.snippet), cut(result.snippet) ? "…" : null) : null,
      element("div", {className: "about"},
        score(result.score, best),
        result.topic ? element("span", {className: "topic"}, result.topic) : null,
        similar),
      more));
  return item;
}

/** Open or close a card. */
export const toggle = item => item.querySelector(".title").click();

/** Show a score, and a bar with its ratio to the best one. */
function score(value, best) {
  const bar = element("span", {className: "score-bar", "aria-hidden": "true"}, element("span"));
  bar.firstChild.style.width = `${100 * (best > 0 ? Math.min(1, Math.max(0, value / best)) : 0)}%`;
  return element("span", {className: "score"}, bar, spoken("score "), number(value));
}

/** Return whether a snippet stops in the middle of a sentence. */
const cut = snippet => snippet.length > 160 && !/\p{P}$/u.test(snippet);

function details(result) {
  const {dense, sparse, rerank, shard} = result.explain ?? {};
  const rows = [
    ...Object.entries(result).filter(([name]) => !OWN.has(name)).map(([name, value]) => [name.replaceAll("_", " "), value]),
    ["document", result.doc_id, "code"],
    ["semantic ID", result.semantic_id, "code"],
    ["by embeddings", number(dense)], ["by terms", number(sparse)], ["by the re-ranker", number(rerank)],
    ["shard", shard],
  ];
  return rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value, tag]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, tag ? element(tag, {}, said(value)) : said(value))));
}

const number = value => (typeof value === "number" ? value.toFixed(3) : null);

function said(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return value.toLocaleString("en", {maximumFractionDigits: 3});
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
