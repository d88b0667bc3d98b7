// Answers as elements: a list of results, or two lists side by side with links between common documents.

import {notice, timings} from "./answer.js";
import {badge, links} from "./compare.js";
import {element} from "./element.js";
import {highlighter} from "./highlight.js";
import {choice} from "./options.js";
import {card} from "./result.js";
import {waysOf} from "./ways.js";

/**
 * Return the elements of #columns. `outcomes` has {answer, roundTrip} or {failure} for each request; `page` has the
 * state, the server's info, the known titles, and `change`.
 */
export function columns(requests, outcomes, page) {
  const both = outcomes.length === 2 && outcomes.every(({answer}) => answer);
  const names = new Map(waysOf(page.info).map(({name, title}) => [name, title]));
  const named = place => names.get(page.state.compare[place]) ?? page.state.compare[place];
  const made = outcomes.map((outcome, place) => column(requests[place], outcome, {
    ...page, place, headed: outcomes.length === 2, name: outcomes.length === 2 ? `Results of ${named(place)}` : "Results",
    other: both ? {results: outcomes[1 - place].answer.results, name: named(1 - place)} : null,
  }));
  return both ? [made[0], links(...made), made[1]] : made;
}

function column(request, {answer, roundTrip, failure}, {state, info, titles, change, place, other, headed, name}) {
  const mark = highlighter(request.body.query ?? titles.get(request.body.doc_id) ?? "");
  const cards = (answer?.results ?? []).map((result, at) => card(result, {
    rank: at + 1,
    best: answer.results[0].score,
    mark,
    badge: other && badge(result.doc_id, at + 1, other),
    onSimilar: () => change({similar: result.doc_id}),
  }));
  return element("section", {className: "column", "aria-label": name},
    headed ? head(place, {answer, roundTrip}, {state, info, change}) : null,
    failure ? notice("error", failure.message) : null,
    answer && !cards.length ? nothing(state, change) : null,
    element("ol", {"aria-label": name}, ...cards));
}

/** Return the head of a column: its way to search, and the time it took. */
function head(place, {answer, roundTrip}, {state, info, change}) {
  const ways = info.arms.length ? waysOf(info) : state.compare.map(name => ({name, title: name}));
  const select = choice(ways.map(({name, title}) => [name, title]), {
    "aria-label": place ? "Column on the right" : "Column on the left",
  });
  select.value = state.compare[place];
  select.addEventListener("change", () => change({
    compare: state.compare.map((way, at) => (at === place ? select.value : way)),
  }));
  return element("div", {className: "column-head"}, select,
    element("p", {}, ...(answer ? timings(answer, {roundTrip}) : [])));
}

function nothing(state, change) {
  if (!Object.keys(state.filter).length) return element("div", {className: "nothing"}, element("p", {}, "No document was found."));
  const clear = element("button", {type: "button"}, "Remove all filters");
  clear.addEventListener("click", () => change({filter: {}}));
  return element("div", {className: "nothing"}, element("p", {}, "No document passes these filters."), clear);
}
