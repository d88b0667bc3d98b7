// What is said about an answer: how many results, how long each step took, what is missing, what went wrong.

import {byId, element} from "./element.js";

/** Milliseconds, as precise as they are small. */
const ms = value => (value < 10 ? value.toFixed(1) : Math.round(value).toString());

/** "10 results". */
export function counted(answer) {
  const number = answer.results.length;
  return number === 1 ? "1 result" : `${number.toLocaleString("en")} results`;
}

/** The steps of an answer, as a bar and in figures; `arm` is named where there are several. */
export function timings(answer, {roundTrip, arm = null}) {
  const {total, ...steps} = answer.timings_ms;
  const spent = Object.entries({...steps, network: roundTrip - total}).filter(([, value]) => value >= 0.05);
  const bar = element("span", {className: "steps", "aria-hidden": "true"}, ...spent.map(([name, value]) => {
    const step = element("span", {className: `step ${name}`});
    step.style.flexGrow = value;
    return step;
  }));
  const facts = [
    ...spent.map(([name, value]) => [`${name} ${ms(value)}`, `${ms(value)} ms: ${name}`]),
    arm && [arm, "query tower"],
    answer.personalised ? ["personalised", "what is known of the user had a say"] : null,
  ].filter(fact => fact);
  const spans = facts.map(([text, title]) => element("span", {title}, text));
  return [element("span", {title: "in the server"}, `${ms(total)} ms`), bar, ...spans];
}

/** What to tell of an answer that not all shards gave; null for a whole one. */
export function missing(answer) {
  if (answer.shards_answered >= answer.shards) return null;
  return `${answer.shards_answered} of ${answer.shards} shards answered in time: some results may be missing.`;
}

/** A notice of a kind ("warning", "error", "wait"), with at most one thing to do about it. */
export function notice(kind, text, {detail, action, act} = {}) {
  const button = action && element("button", {type: "button"}, action);
  button?.addEventListener("click", act);
  return element("div", {className: `notice ${kind}`, role: kind === "error" ? "alert" : "status"},
    element("p", {}, text, detail ? element("small", {}, detail) : null), button);
}

/** Notices in place of those before. */
export const notify = (...notices) => byId("notices").replaceChildren(...notices.filter(each => each));

/** Puts a failure beside the field that it is about; false where there is none in sight. */
export function beside(failure) {
  const place = [...document.querySelectorAll("[data-field]")].find(each => each.dataset.field === failure.field);
  if (!place) return false;
  place.textContent = failure.message;
  place.hidden = false;
  document.querySelectorAll(`[aria-describedby="${CSS.escape(place.id)}"]`).forEach(input => input.setAttribute("aria-invalid", "true"));
  return place.checkVisibility();
}

/** Takes back what :func:`beside` said. */
export function clearFields() {
  document.querySelectorAll(".field-error").forEach(place => { place.hidden = true; });
  document.querySelectorAll("[aria-invalid]").forEach(input => input.removeAttribute("aria-invalid"));
}
