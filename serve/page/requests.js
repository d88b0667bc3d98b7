// What a state asks of the API: one request, or one per query tower.

const RERANKED = 20;

/** Requests as {path, body}. */
export function requestsOf({query, k, filter, arm, compare, similar, weight, rerank, user}) {
  const common = {k, ...(Object.keys(filter).length && {filter})};
  if (similar !== null) return [{path: "similar", body: {doc_id: similar, ...common, ...(arm && {arm})}}];
  const body = {
    query, ...common, explain: true,
    ...(weight !== null && {dense_weight: weight}),
    ...(rerank && {rerank: Math.max(RERANKED, k)}),
    ...(user && {user_id: user}),
  };
  return (compare ?? [arm]).map(arm => ({path: "search", body: {...body, ...(arm && {arm})}}));
}

/** Titles of documents in a direction drawn at random: nobody keeps a list of examples, and every visit has others. */
export function atRandom({dim, max_k}) {
  const normal = () => Number((Math.random() + Math.random() + Math.random() - 1.5).toFixed(3));
  return {path: "search", body: {vector: Array.from({length: dim}, normal), k: Math.min(24, max_k)}};
}
