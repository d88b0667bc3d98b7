// Texts about an answer: the number of results, the time of each step, missing results, and errors.

import {byId, element} from "./element.js";

/** Format milliseconds: small numbers have a decimal place. */
const ms = value => (value < 10 ? value.toFixed(1) : Math.round(value).toString());

/** Return for example "10 results". */
export function counted(answer) {
  const number = answer.results.length;
  return number === 1 ? "1 result" : `${number.toLocaleString("en")} results`;
}

/** Return the steps of an answer as a bar and as numbers; `arm` is given if there are several. */
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
    answer.personalised ? ["personalised", "features of the user changed the results"] : null,
  ].filter(fact => fact);
  const spans = facts.map(([text, title]) => element("span", {title}, text));
  return [element("span", {title: "in the server"}, `${ms(total)} ms`), bar, ...spans];
}

/** Return a warning about an answer without some shards; null for a complete one. */
export function missing(answer) {
  if (answer.shards_answered >= answer.shards) return null;
  return `${answer.shards_answered} of ${answer.shards} shards answered in time: some results may be missing.`;
}

/** Return a notice of a kind ("warning", "error", "wait"), with at most one action. */
export function notice(kind, text, {detail, action, act} = {}) {
  const button = action && element("button", {type: "button"}, action);
  button?.addEventListener("click", act);
  return element("div", {className: `notice ${kind}`, role: kind === "error" ? "alert" : "status"},
    element("p", {}, text, detail ? element("small", {}, detail) : null), button);
}

/** Replace the notices. */
export const notify = (...notices) => byId("notices").replaceChildren(...notices.filter(each => each));

/** Show a failure next to its field; return false if no field of it is visible. */
export function beside(failure) {
  const place = [...document.querySelectorAll("[data-field]")].find(each => each.dataset.field === failure.field);
  if (!place) return false;
  place.textContent = failure.message;
  place.hidden = false;
  document.querySelectorAll(`[aria-describedby="${CSS.escape(place.id)}"]`).forEach(input => input.setAttribute("aria-invalid", "true"));
  return place.checkVisibility();
}

/** Remove the failures that `beside` has shown. */
export function clearFields() {
  document.querySelectorAll(".field-error").forEach(place => { place.hidden = true; });
  document.querySelectorAll("[aria-invalid]").forEach(input => input.removeAttribute("aria-invalid"));
}
