// The options of a search: filters from the fields of /info, query tower, weights. Only options that the server offers
// are shown.

import {byId, element} from "./element.js";

const FEW = 8;  // facet values shown before "show all"

/** Build filters and options of this server in #options. `change` is called with the changed part of a state. */
export function lay(info, state, change) {
  const filter = (field, wanted) => {
    const {[field]: _, ...others} = state().filter;
    change({filter: wanted === null ? others : {...state().filter, [field]: wanted}});
  };
  const blocks = [
    ...Object.entries(info.fields).map(([field, kind]) => {
      if (info.facets[field]?.length) return facet(field, info.facets[field], state, filter);
      if (kind === "number") return range(field, filter);
      return kind === "boolean" ? yesOrNo(field, filter) : null;
    }),
    info.arms.length > 1 ? tower(info.arms, change) : null,
    info.sparse ? weight(change) : null,
    info.rerank ? rerank(change) : null,
    info.arms.some(arm => arm.personalised) ? user(change) : null,
  ].filter(block => block);
  byId("options").replaceChildren(...blocks);
  byId("options").hidden = !blocks.length;
  byId("options-button").hidden = !blocks.length;
}

/** Set every control to the value in a state. */
export function show(state) {
  const options = byId("options");
  for (const box of options.querySelectorAll("[data-facet]")) {
    box.checked = state.filter[box.dataset.facet]?.includes?.(box.value) ?? false;
  }
  for (const input of options.querySelectorAll("[data-bound]")) {
    if (input !== document.activeElement) input.value = state.filter[input.dataset.of]?.[input.dataset.bound] ?? "";
  }
  for (const select of options.querySelectorAll("[data-flag]")) select.value = state.filter[select.dataset.flag] ?? "";
  const set = (id, property, value) => { if (byId(id)) byId(id)[property] = value; };
  set("arm", "value", state.arm ?? "");
  set("arm", "disabled", Boolean(state.compare));
  set("weight", "value", state.weight ?? 0.5);
  set("weight-value", "textContent", state.weight === null ? "as the index was tuned" : state.weight.toFixed(2));
  set("weight-reset", "hidden", state.weight === null);
  set("rerank", "checked", state.rerank);
  set("user", "value", state.user ?? "");
  const chosen = chips(state.filter).length;
  byId("options-button").textContent = chosen ? `Filters (${chosen})` : "Filters";
}

/** Show every condition of the filter as a button that removes it. */
export function showChips(state, change) {
  const buttons = chips(state.filter).map(({text, without}) => {
    const button = element("button", {type: "button", title: "Remove this filter"}, text, element("span", {"aria-hidden": "true"}, "×"));
    button.addEventListener("click", () => change({filter: without}));
    return button;
  });
  byId("chips").replaceChildren(...buttons);
  byId("chips").hidden = !buttons.length;
}

/** Return for every condition of a filter its text, and the filter without it. */
function chips(filter) {
  return Object.entries(filter).flatMap(([field, wanted]) => {
    const {[field]: _, ...others} = filter;
    const name = field.replaceAll("_", " ");
    if (Array.isArray(wanted)) {
      return wanted.map(value => {
        const left = wanted.filter(kept => kept !== value);
        return {text: `${name}: ${value}`, without: left.length ? {...filter, [field]: left} : others};
      });
    }
    if (typeof wanted === "boolean") return [{text: `${name}: ${wanted ? "yes" : "no"}`, without: others}];
    const {min, max} = wanted;
    const said = min === undefined ? `up to ${max}` : max === undefined ? `from ${min}` : `${min} to ${max}`;
    return [{text: `${name}: ${said}`, without: others}];
  });
}

function block(name, ...children) {
  return element("fieldset", {}, element("legend", {}, name), ...children);
}

/** Return the element for an error of the server about this field. */
function complaint(field) {
  return element("p", {id: `error-${field}`, className: "field-error", role: "alert", hidden: true, "data-field": field});
}

function facet(field, values, state, filter) {
  const rows = values.map(({value, count}, place) => {
    const box = element("input", {type: "checkbox", value, "data-facet": field});
    box.addEventListener("change", () => {
      const before = state().filter[field];
      const chosen = Array.isArray(before) ? before.filter(kept => kept !== value) : [];
      if (box.checked) chosen.push(value);
      filter(field, chosen.length ? chosen : null);
    });
    return element("label", {className: "value", hidden: place >= FEW},
      box, element("span", {className: "name"}, value || "none"),
      element("span", {className: "number"}, count.toLocaleString("en")));
  });
  const all = element("button", {type: "button", className: "quiet", hidden: rows.length <= FEW}, `Show all ${rows.length}`);
  all.addEventListener("click", () => {
    rows.forEach(row => { row.hidden = false; });
    all.hidden = true;
    rows[FEW].querySelector("input").focus();
  });
  return block(field.replaceAll("_", " "), ...rows, all, complaint(`filter.${field}`));
}

function range(field, filter) {
  const inputs = ["min", "max"].map(bound => element("input", {
    type: "number", step: "any", placeholder: bound, "data-bound": bound, "data-of": field,
    "aria-label": `${field.replaceAll("_", " ")}, ${bound}`, "aria-describedby": `error-filter.${field}`,
  }));
  const changed = () => {
    const given = inputs.filter(input => input.value !== "").map(input => [input.dataset.bound, Number(input.value)]);
    filter(field, given.length ? Object.fromEntries(given) : null);
  };
  inputs.forEach(input => input.addEventListener("change", changed));
  return block(field.replaceAll("_", " "),
    element("div", {className: "range"}, inputs[0], element("span", {"aria-hidden": "true"}, "to"), inputs[1]),
    complaint(`filter.${field}`));
}

function yesOrNo(field, filter) {
  const name = field.replaceAll("_", " ");
  const select = choice([["", "any"], ["true", "yes"], ["false", "no"]], {"data-flag": field, "aria-label": name});
  select.addEventListener("change", () => filter(field, select.value === "" ? null : select.value === "true"));
  return block(name, select, complaint(`filter.${field}`));
}

function tower(arms, change) {
  const named = arms.map(arm => [arm.name, armName(arm)]);
  const select = choice([["", "as traffic is split"], ...named], {id: "arm", "aria-label": "Query tower"});
  select.addEventListener("change", () => change({arm: select.value || null}));
  return block("query tower", select, complaint("arm"));
}

function weight(change) {
  const input = element("input", {
    id: "weight", type: "range", min: "0", max: "1", step: "0.05", "aria-label": "Weight of embeddings against terms",
  });
  input.addEventListener("change", () => change({weight: Number(input.value)}));
  const reset = element("button", {id: "weight-reset", type: "button", className: "quiet"}, "Reset");
  reset.addEventListener("click", () => change({weight: null}));
  return block("terms or meaning", input,
    element("p", {className: "hint"}, element("span", {id: "weight-value"}), " ", reset), complaint("dense_weight"));
}

function rerank(change) {
  const box = element("input", {id: "rerank", type: "checkbox"});
  box.addEventListener("change", () => change({rerank: box.checked}));
  return block("ranking",
    element("label", {className: "value"}, box, element("span", {className: "name"}, "re-rank the best")),
    complaint("rerank"));
}

function user(change) {
  const input = element("input", {id: "user", type: "text", placeholder: "no user", "aria-label": "Search as user", autocomplete: "off"});
  input.addEventListener("change", () => change({user: input.value.trim() || null}));
  return block("as user", input, complaint("user_id"));
}

/** Return the displayed name of an arm. */
export const armName = arm => (arm.tower && arm.tower !== arm.name ? `${arm.name} (${arm.tower})` : arm.name);

/** Create a select of [value, text] pairs. */
export function choice(pairs, properties) {
  return element("select", properties, ...pairs.map(([value, text]) => element("option", {value}, text)));
}
