// The introduction of the server: size of its index, ways to search, links, and titles to try.

import {ask} from "./api.js";
import {byId, element} from "./element.js";
import {explained, waysOf} from "./ways.js";

let asked = false;
const DRAWN = 24, OFFERED = 3, LONG = 36;  // documents drawn, titles offered, letters of the longest title

/** Show size and version of the index, the ways to search, and the keys that have an effect here. */
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

/** Offer titles of documents near a random vector: every visit has other examples, and no list of them is needed. */
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
