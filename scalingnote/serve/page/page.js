// The flow of the page, in one direction: action of the user ─► state (in the address) ─► requests ─► answers ─► elements.

import {FIRST_K, read, write} from "./address.js";
import {beside, clearFields, counted, missing, notice, notify, timings} from "./answer.js";
import {ask, asCurl, Failure, key} from "./api.js";
import {columns} from "./columns.js";
import {agreement, point} from "./compare.js";
import {byId, element} from "./element.js";
import {introduce, offer} from "./introduction.js";
import {listen} from "./keyboard.js";
import * as options from "./options.js";
import {requestsOf} from "./requests.js";
import {toggle} from "./result.js";
import {firstPair, waysOf} from "./ways.js";

const PAUSE_MS = 110;  // of typing, before a query is sent
const LEARN_MS = 30_000;  // between two requests for /info
const PATIENCE_MS = 400;
const COMPOSING = -1;  // not the number of a timer
const NOTHING = {name: "ScalingNote", arms: [], fields: {}, facets: {}, max_k: 100};  // before /info is read

let info = NOTHING;
let learnt = 0;  // when `info` was requested
let state = read(location.search);
let shown = state;  // the state of the answer on the page
let drafting = false;  // whether a query is being typed: it is one step of the history, however many letters it has
let typing = 0;  // a timer while the box has a text that is not in the state yet: then no code writes to the box
let newest = new AbortController();  // of the newest request: answers to older ones are never shown
const titles = new Map();  // of documents, by doc_id
const query = byId("query");

/** Show another state. `how`: "push" adds a step to the history, "draft" is for a query that is still being typed. */
function change(changed, how = "push") {
  if ("query" in changed || "similar" in changed) settle();
  state = {...state, ...changed};
  const address = write(state);
  if (how === "draft" && drafting) history.replaceState(null, "", address);
  else if (new URL(address, location).href !== location.href) history.pushState(null, "", address);
  drafting = how === "draft";
  return refresh();
}

/** Send the requests of the state, and show the answer unless a newer request was sent meanwhile. */
async function refresh() {
  newest.abort();
  const mine = newest = new AbortController();
  showControls();
  const start = !state.query && state.similar === null;
  document.documentElement.classList.toggle("start", start);
  if (start) return showStart();
  byId("answer").setAttribute("aria-busy", "true");
  const requests = requestsOf(state);
  const outcomes = await Promise.all(requests.map(request => outcome(request, mine.signal)));
  if (mine.signal.aborted) return;
  byId("answer").setAttribute("aria-busy", "false");
  clearFields();
  if (outcomes.every(({failure}) => failure)) showFailure(outcomes[0].failure);
  else showAnswers(requests, outcomes);
  shown = state;
}

/** Return {answer, roundTrip in ms}, or {failure}. */
async function outcome({path, body}, signal) {
  const start = performance.now();
  const waiting = failure => notify(notice("wait", `${failure.message} Trying once more in ${failure.retryAfter} s.`));
  try {
    return {answer: await ask(path, body, {signal, waiting}), roundTrip: performance.now() - start};
  } catch (failure) {
    if (failure instanceof Failure || signal.aborted) return {failure};
    throw failure;
  }
}

function showControls() {
  if (!typing && query.value.trim() !== state.query) query.value = state.query;
  document.title = state.query ? `${state.query} · ${info.name}` : info.name;
  document.body.classList.toggle("comparing", Boolean(state.compare) && state.similar === null);
  byId("compare-button").setAttribute("aria-pressed", Boolean(state.compare));
  byId("compare-button").hidden = waysOf(info).length < 2 || state.similar !== null;
  options.show(state);
  options.showChips(state, change);
  showHeading();
}

function showHeading() {
  const heading = byId("heading");
  heading.hidden = state.similar === null;
  if (heading.hidden) return;
  const leave = element("button", {type: "button", title: "Back (Esc)"}, state.query ? "Back to results" : "Back");
  leave.addEventListener("click", () => change({similar: null}));
  const name = element("q", {}, titles.get(state.similar) ?? state.similar);
  heading.replaceChildren(element("h2", {}, "Similar to ", name), leave);
  if (titles.has(state.similar)) return;
  // The page was opened by this address, so the title is read from the document.
  ask(`documents/${encodeURIComponent(state.similar)}`, null, {signal: newest.signal})
    .then(document => { name.textContent = document.title || document.doc_id; }, () => {});
}

function showStart() {
  if (info !== NOTHING) notify();  // else the notice explains why there is no information
  clearFields();
  byId("columns").replaceChildren();
  byId("count").textContent = "";
  offer(info, title => change({query: title}).then(() => query.focus()));
}

function showAnswers(requests, outcomes) {
  const answers = outcomes.map(({answer}) => answer).filter(answer => answer);
  for (const result of answers.flatMap(({results}) => results)) titles.set(result.doc_id, result.title || result.doc_id);
  const focused = document.activeElement?.closest?.(".card")?.dataset.doc;
  byId("columns").className = outcomes.length === 2 ? "two" : "";
  byId("columns").replaceChildren(...columns(requests, outcomes, {state, info, titles, change}));
  refocus(focused);

  const single = outcomes.length === 1 ? outcomes[0] : null;
  byId("count").textContent = answers.length === 2 ? agreement(answers) : counted(answers[0]);
  byId("timings").replaceChildren(...(single
    ? timings(single.answer, {roundTrip: single.roundTrip, arm: info.arms.length > 1 ? single.answer.arm : null})
    : []));
  const partial = answers.map(missing).find(text => text);
  notify(partial && notice("warning", partial, {action: "Ask again", act: refresh}));
  byId("more").hidden = state.k >= info.max_k || answers.every(({results}) => results.length < state.k);
  byId("request").hidden = false;
  byId("request").querySelector("pre").textContent = requests.map(({path, body}) => asCurl(path, body)).join("\n\n");
  // /info has not been read yet, or the index has changed. An arm may have a separate index, hence the pause.
  const other = answers.some(answer => answer.index_version !== info.index_version);
  if (info === NOTHING || (other && performance.now() - learnt > LEARN_MS)) learn();
}

/** Keep the focus on its document, or move it to the first one; move it back when similar documents are left. */
function refocus(focused) {
  const at = doc => doc && byId("columns").querySelector(`.card[data-doc="${CSS.escape(doc)}"] .title`);
  const left = shown.similar !== state.similar ? shown.similar : null;
  if (document.activeElement === query) return;
  if (state.similar !== null && left === null && shown.similar !== state.similar) scrollTo(0, 0);
  const title = at(left) ?? at(focused) ?? (focused ? byId("columns").querySelector(".title") : null);
  title?.focus({preventScroll: !left});
}

function showFailure(failure) {
  byId("columns").replaceChildren();
  byId("timings").replaceChildren();
  byId("count").textContent = "";
  byId("more").hidden = byId("request").hidden = true;
  if (failure.status === 401) return askForKey(failure);
  if (failure.field && beside(failure)) return notify();
  notify(notice("error", failure.message, {
    detail: failure.requestId && `Request ${failure.requestId}`, action: "Try again", act: again,
  }));
}

const atStart = () => document.documentElement.classList.contains("start");

function again() {
  refresh();
  if (info === NOTHING) learn();
}

function askForKey(failure) {
  const dialog = byId("key");
  notify(notice("error", "This server needs an API key.", {action: "Enter key", act: () => dialog.showModal()}));
  if (key.get()) byId("key-why").textContent = `The key was refused: ${failure.message}`;
  key.set(null);
  byId("key-input").value = "";
  if (!dialog.open) dialog.showModal();
}

/** Read /info. Until the server answers, the page is a plain search box. */
async function learn() {
  learnt = performance.now();
  try {
    info = {...NOTHING, ...(await ask("info"))};
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    return void (atStart() && showFailure(failure));
  }
  const known = new Set(waysOf(info).map(way => way.name));
  if (!state.compare?.every(name => known.has(name))) state.compare = null;
  options.lay(info, () => state, change);
  introduce(info);
  showControls();
  if (atStart()) showStart();
}

function toggleCompare() {
  if (waysOf(info).length < 2 || state.similar !== null || !state.query) return false;
  change({compare: state.compare ? null : firstPair(info, state.arm)});
  return true;
}

function toggleOptions(open) {
  byId("options").classList.toggle("open", open);
  byId("options-button").setAttribute("aria-expanded", byId("options").classList.contains("open"));
}

/** Close options, similar documents or the comparison; return false if none is open. */
function back() {
  if (byId("options").classList.contains("open")) toggleOptions(false);
  else if (state.similar !== null) change({similar: null});
  else if (state.compare) change({compare: null});
  else return false;
  return true;
}

function typed(event) {
  clearTimeout(typing);
  typing = COMPOSING;
  if (event?.isComposing) return;  // half of a character is not a query
  typing = setTimeout(() => {
    settle();
    const text = query.value.trim();
    if (text !== state.query || state.similar !== null) change({query: text, similar: null, k: FIRST_K}, "draft");
  }, PAUSE_MS);
}

/** Stop waiting for the text in the box. */
function settle() {
  clearTimeout(typing);
  typing = 0;
}

query.addEventListener("input", typed);
query.addEventListener("compositionend", typed);
document.querySelector("form[role=search]").addEventListener("submit", event => {
  event.preventDefault();
  change({query: query.value.trim(), similar: null});
});
byId("more").addEventListener("click", async () => {
  const seen = document.querySelectorAll(".card").length;
  await change({k: Math.min(2 * state.k, info.max_k)});
  if (!state.compare) document.querySelectorAll(".card .title")[seen]?.focus({preventScroll: true});
});
byId("compare-button").addEventListener("click", toggleCompare);
byId("options-button").addEventListener("click", () => toggleOptions());
byId("help-button").addEventListener("click", () => byId("help").showModal());
byId("key").addEventListener("close", event => {
  if (event.target.returnValue !== "save" || !byId("key-input").value) return;
  event.target.returnValue = "";
  key.set(byId("key-input").value.trim());
  notify();
  again();
});
// Only a pointer that moves, not one on a page that is scrolled.
for (const kind of ["pointermove", "focusin"]) {
  byId("columns").addEventListener(kind, event => point(byId("columns"), event.target.closest(".card")?.dataset.doc ?? null));
}
addEventListener("popstate", () => {
  state = read(location.search);
  drafting = false;
  settle();
  refresh();
});
addEventListener("online", () => document.querySelector(".notice.error") && again());
listen({toggle, back, compare: toggleCompare, similar: item => item.querySelector(".similar").click()});

if (!query.value) query.value = state.query;
else if (query.value.trim() !== state.query) typed();  // the user typed before this script was loaded
// The layout depends on /info: waiting for it for a short time avoids a shift of the layout.
Promise.race([learn(), new Promise(resolve => setTimeout(resolve, PATIENCE_MS))]).then(refresh);
