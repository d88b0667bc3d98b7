// The requests of a state: one request, or one for each way to search that is compared.

import {asked} from "./ways.js";

const RERANKED = 20;

/** Return requests as {path, body}. */
export function requestsOf({query, k, filter, arm, compare, similar, weight, rerank, user}) {
  const common = {k, ...(Object.keys(filter).length && {filter})};
  if (similar !== null) return [{path: "similar", body: {doc_id: similar, ...common, ...(arm && {arm})}}];
  const body = {
    query, ...common, explain: true,
    ...(weight !== null && {dense_weight: weight}),
    ...(rerank && {rerank: Math.max(RERANKED, k)}),
    ...(user && {user_id: user}),
  };
  return (compare ?? [arm]).map(way => ({path: "search", body: {...body, ...(way && asked(way))}}));
}
