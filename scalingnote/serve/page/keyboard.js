// The keyboard: one table of keys, and the moves of the focus.

import {counterpart} from "./compare.js";
import {byId} from "./element.js";

/** Handle keys; `act` has similar(card), compare(), back() and toggle(card). */
export function listen(act) {
  const query = byId("query");
  const focused = () => document.activeElement?.closest?.(".card") ?? null;

  const toQuery = () => {
    query.focus();
    query.select();
    return true;
  };
  const focus = card => {
    if (!card) return false;
    card.querySelector(".title").focus();
    card.scrollIntoView({block: "nearest"});
    return true;
  };
  const walk = step => {
    const card = focused();
    if (!card) return step > 0 && document.activeElement === query && focus(document.querySelector(".card"));
    const next = step > 0 ? card.nextElementSibling : card.previousElementSibling;
    return next ? focus(next) : step < 0 && toQuery();
  };
  const across = step => {
    const column = focused()?.closest(".column");
    const columns = [...document.querySelectorAll(".column")];
    const other = column && columns[columns.indexOf(column) + step];
    return Boolean(other) && focus(counterpart(focused(), other));
  };
  const escape = () => {
    const card = focused();
    if (card?.classList.contains("open")) return act.toggle(card), true;
    if (act.back()) return true;
    return card ? toQuery() : false;
  };

  const everywhere = {ArrowDown: () => walk(1), ArrowUp: () => walk(-1), Escape: escape};
  const outsideOfFields = {
    "/": toQuery,
    "?": () => (byId("help").showModal(), true),
    c: () => act.compare(),
    s: () => focused() !== null && act.similar(focused()),
    ArrowLeft: () => across(-1),
    ArrowRight: () => across(1),
  };
  document.addEventListener("keydown", event => {
    // An open dialog has its own keys; Escape closes it.
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest("input:not([type=checkbox]), select");
    if (typing && typing !== query) return;
    const does = everywhere[event.key] ?? (typing ? undefined : outsideOfFields[event.key]);
    if (does?.()) event.preventDefault();
  });
}
