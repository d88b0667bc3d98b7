// Two answers to one query: each card has the rank of its document in the other answer, and lines connect the columns.

import {element, spoken} from "./element.js";

const SVG = "http://www.w3.org/2000/svg";

/** Return the badge of a card: the document's rank in the other column, {results, name}. */
export function badge(docId, rank, other) {
  const there = other.results.findIndex(result => result.doc_id === docId) + 1;
  if (!there) return element("span", {className: "badge only", title: `not among the best of ${other.name}`}, "only here");
  const by = there - rank;
  const title = `rank ${there} in ${other.name}`;
  if (!by) return element("span", {className: "badge same", title}, "=", spoken(` same rank in ${other.name}`));
  return element("span", {className: "badge moved", title}, `${by > 0 ? "↑" : "↓"}${Math.abs(by)}`, spoken(`, ${title}`));
}

/** Return how much two answers agree. */
export function agreement([one, other]) {
  const ranks = new Map(other.results.map((result, at) => [result.doc_id, at]));
  const shared = one.results.filter(result => ranks.has(result.doc_id));
  const same = one.results.filter((result, at) => ranks.get(result.doc_id) === at).length;
  const most = Math.max(one.results.length, other.results.length);
  return `${shared.length} of ${most} documents in both, ${same} at the same rank`;
}

/** Draw a curve between the cards of every shared document, and redraw when a card is resized; return the drawing. */
export function links(left, right) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("class", "links");
  drawing.setAttribute("aria-hidden", "true");
  const draw = () => {
    const frame = drawing.getBoundingClientRect();
    const middle = card => {
      const box = card.querySelector(".headline").getBoundingClientRect();
      return box.top + Math.min(box.height, 24) / 2 - frame.top;
    };
    const others = byDocument(right);
    drawing.replaceChildren(...[...byDocument(left)].filter(([doc]) => others.has(doc)).map(([doc, card]) => {
      const [from, to, width] = [middle(card), middle(others.get(doc)), frame.width];
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", `M0 ${from} C${width / 2} ${from} ${width / 2} ${to} ${width} ${to}`);
      path.dataset.doc = doc;
      path.classList.toggle("pointed", card.classList.contains("pointed"));
      return path;
    }));
  };
  const watch = new ResizeObserver(() => (drawing.isConnected ? draw() : watch.disconnect()));
  [drawing, left, right].forEach(each => watch.observe(each));
  return drawing;
}

/** Mark a document in both columns, and its curve; null marks none. */
export function point(columns, doc) {
  columns.querySelectorAll("[data-doc]").forEach(each => each.classList.toggle("pointed", each.dataset.doc === doc));
}

/** Return the card of the same document in another column, or else the card nearest to its rank. */
export function counterpart(card, column) {
  const rank = [...card.parentElement.children].indexOf(card);
  const cards = [...column.querySelectorAll(".card")];
  return byDocument(column).get(card.dataset.doc) ?? cards[Math.min(rank, cards.length - 1)];
}

const byDocument = column => new Map([...column.querySelectorAll(".card")].map(card => [card.dataset.doc, card]));
