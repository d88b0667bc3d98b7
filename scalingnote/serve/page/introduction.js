// What the server says of itself: how much it knows, how it searches, where to read on, and titles to begin with.

import {ask} from "./api.js";
import {byId, element} from "./element.js";
import {explained, waysOf} from "./ways.js";

let asked = false;
const DRAWN = 24, OFFERED = 3, LONG = 36;  // documents drawn, titles offered, letters of the longest

/** Size and version of the index, beside the query and in the footer; what searches; keys that do something here. */
export function introduce(info) {
  const documents = `${info.documents.toLocaleString("en")} documents`;
  byId("corpus").textContent = `${documents} in ${info.shards === 1 ? "1 shard" : `${info.shards} shards`}`;
  byId("ways").replaceChildren(...explained(info));
  byId("ways").hidden = false;
  byId("footer").replaceChildren(
    element("span", {}, `${info.name} ${info.version}`),
    element("span", {className: "documents"}, documents),
    element("span", {title: info.index_version}, `index ${info.index_version.slice(0, 8)}`),
    element("a", {href: "openapi.json"}, "API"));
  byId("help").querySelectorAll("[data-needs=compare]").forEach(row => { row.hidden = waysOf(info).length < 2; });
}

/** Offers titles of documents in a direction drawn at random: nobody keeps a list of examples, every visit has others. */
export async function offer(info, choose) {
  const group = byId("examples");
  if (!info.dim || asked) return;
  asked = true;
  const normal = () => Number((Math.random() + Math.random() + Math.random() - 1.5).toFixed(3));
  const vector = Array.from({length: info.dim}, normal);
  const answer = await ask("search", {vector, k: Math.min(DRAWN, info.max_k)}).catch(() => null);
  const found = (answer?.results ?? []).map(result => result.title.trim()).filter(title => title && title.length <= LONG);
  if (!found.length) return;
  group.append(element("span", {}, "Try"), ...[...new Set(found)].slice(0, OFFERED).map(title => {
    const button = element("button", {type: "button"}, title);
    button.addEventListener("click", () => choose(title));
    return button;
  }));
  group.hidden = false;
}
