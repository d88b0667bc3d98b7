// The state of the page in its address: the address can be shared, and the back button returns to earlier states.
//
//   ?q=heart+attack&k=20&in.topic=cardiology&min.price=10&is.in_stock=true&arm=student
//   ?q=heart+attack&compare=student&compare=:words        ?q=heart+attack&similar=doc-17

export const FIRST_K = 10;

/** Return the state that an address describes. */
export function read(address) {
  const given = new URLSearchParams(address);
  const number = (text, fallback) => (text !== null && text.trim() !== "" && Number.isFinite(+text) ? +text : fallback);
  const compare = given.getAll("compare").slice(0, 2);
  return {
    query: given.get("q") ?? "",
    k: Math.max(1, Math.trunc(number(given.get("k"), FIRST_K))),
    filter: readFilter(given, number),
    arm: given.get("arm"),
    compare: compare.length === 2 ? compare : null,
    similar: given.get("similar"),
    weight: number(given.get("weight"), null),
    rerank: given.get("rerank") === "true",
    user: given.get("user"),
  };
}

/** Return the address of a state: only its differences from an empty page. */
export function write(state) {
  const given = new URLSearchParams();
  const put = (name, value) => { if (value !== null && value !== "") given.append(name, value); };
  put("q", state.query);
  put("k", state.k === FIRST_K ? null : state.k);
  for (const [field, wanted] of Object.entries(state.filter)) {
    if (Array.isArray(wanted)) wanted.forEach(value => put(`in.${field}`, value));
    else if (typeof wanted === "boolean") put(`is.${field}`, wanted);
    else for (const bound of ["min", "max"]) put(`${bound}.${field}`, wanted[bound] ?? null);
  }
  put("arm", state.arm);
  state.compare?.forEach(way => put("compare", way));
  put("similar", state.similar);
  put("weight", state.weight);
  put("rerank", state.rerank || null);
  put("user", state.user);
  return given.size ? `?${given}` : location.pathname;
}

function readFilter(given, number) {
  const filter = Object.create(null);  // without a prototype: a field may have the name of a property of it
  for (const [name, value] of given) {
    const [kind, field] = [name.slice(0, name.indexOf(".")), name.slice(name.indexOf(".") + 1)];
    const before = filter[field];  // a condition of another kind is replaced
    if (kind === "in") filter[field] = Array.isArray(before) ? [...before, value] : [value];
    if (kind === "is") filter[field] = value === "true";
    if ((kind === "min" || kind === "max") && number(value, null) !== null) {
      filter[field] = {...(Array.isArray(before) ? {} : before), [kind]: +value};
    }
  }
  return filter;
}
