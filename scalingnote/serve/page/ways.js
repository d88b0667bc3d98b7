// The ways to search of this server: each query tower with BM25 (hybrid), each without it, and only BM25. The name of a
// way in an address is ARM, ARM:alone or :words.

import {element} from "./element.js";
import {armName} from "./options.js";

const ALONE = "alone", WORDS = "words";
const DENSE_WEIGHT = {[ALONE]: 1, [WORDS]: 0};
const TABLE = "lookup";  // the form of a query tower that runs no model

/** Return all ways as {name, title}: only those without BM25 if the documents have no terms. */
export function waysOf(info) {
  const titled = arm => (info.arms.length > 1 ? armName(arm) : kind(arm));
  const hybrid = info.arms.map(arm => ({name: arm.name, title: info.sparse ? `${titled(arm)} + BM25` : titled(arm)}));
  if (!info.sparse) return hybrid;
  const alone = info.arms.map(arm => ({name: `${arm.name}:${ALONE}`, title: `${titled(arm)} alone`}));
  return [...hybrid, ...alone, {name: `:${WORDS}`, title: "BM25 alone"}];
}

/** Return the fields of a request that choose a way. */
export function asked(name) {
  const [arm, how] = name.split(":");
  return {...(arm && {arm}), ...(how in DENSE_WEIGHT && {dense_weight: DENSE_WEIGHT[how]})};
}

/** Return the two ways that Compare begins with: the one in use, and another tower or BM25. */
export function firstPair(info, arm) {
  const first = arm ?? info.arms[0].name;
  return [first, info.arms.find(({name}) => name !== first)?.name ?? `:${WORDS}`];
}

/** Explain the words on this page, as the rows of a <dl>: only those that this server uses. */
export function explained(info) {
  const kinds = new Set(info.arms.map(kind));
  const rows = [
    ["Teacher", "The embedding model that read every document, once and in advance."],
    kinds.has("table") && ["Table", "Reads a query without a neural network, in microseconds: the mean of its tokens’ vectors, which were trained to agree with the teacher."],
    kinds.has("transformer") && ["Transformer", "Reads a query by a neural network, in milliseconds: the teacher itself, or a smaller one that was trained to agree with it."],
    info.sparse && ["BM25", "Counts the words that a query and a document share; rare words count more. No model is involved."],
    info.sparse && ["Hybrid", "The scores of embeddings and BM25, each scaled to 0–1, are added. The box above searches this way; the options beside the results have the weight."],
    waysOf(info).length > 1 && ["Compare", `Shows two ways side by side, with what they have in common: ${listed(waysOf(info).map(way => way.title))}.`],
  ];
  return rows.filter(row => row).map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text)));
}

const kind = arm => (arm.tower === TABLE ? "table" : "transformer");
const listed = names => (names.length < 3 ? names.join(" and ") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);
