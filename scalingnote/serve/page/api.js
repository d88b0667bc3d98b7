// Requests to the gateway: they have the API key if there is one, are retried once after Retry-After, and report every
// error as a Failure that can be shown.

const KEY = "scalingnote.api-key";
const PATIENCE_S = 10;  // after a longer Retry-After, only the user retries

export class Failure extends Error {
  constructor(message, {status = 0, code = "unreachable", field = null, requestId = null, retryAfter = null} = {}) {
    super(message);
    Object.assign(this, {status, code, field, requestId, retryAfter});
  }
}

// Storage may be forbidden. Then the key is kept as long as the page.
const remembered = use => { try { return use(sessionStorage); } catch { return null; } };
let given = null;

export const key = {
  get: () => given ?? remembered(storage => storage.getItem(KEY)),
  set: value => {
    given = value;
    remembered(storage => (value ? storage.setItem(KEY, value) : storage.removeItem(KEY)));
  },
};

/**
 * Return the body of an answer. Raises Failure, or AbortError if `signal` aborts.
 *
 * A 429 or 503 with Retry-After is retried once after this number of seconds; `waiting` is called before the wait.
 */
export async function ask(path, body, {signal, waiting = () => {}} = {}) {
  try {
    return await once(path, body, signal);
  } catch (failure) {
    const later = failure instanceof Failure && [429, 503].includes(failure.status) && failure.retryAfter;
    if (!later || later > PATIENCE_S) throw failure;
    waiting(failure);
    await pause(later, signal);
    return once(path, body, signal);
  }
}

/** Return the same request for a shell. */
export function asCurl(path, body) {
  const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quoted(new URL(path, document.baseURI).href)}`, "-H 'content-type: application/json'"];
  if (key.get()) lines.push("-H \"authorization: Bearer $SCALINGNOTE_API_KEY\"");
  return [...lines, `-d ${quoted(JSON.stringify(body))}`].join(" \\\n  ");
}

async function once(path, body, signal) {
  const headers = {accept: "application/json"};
  if (body) headers["content-type"] = "application/json";
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(navigator.onLine
      ? "The server does not answer. Is it still running?"
      : "You are offline. The search continues when the connection is back.");
  }
  const answer = await response.json().catch(error => {
    if (error.name === "AbortError") throw error;
    return null;
  });
  if (response.ok && answer) return answer;
  throw failed(response, answer);
}

function failed(response, answer) {
  const {code = "unknown", message, field = null} = answer?.error ?? {};
  const seconds = Number(response.headers.get("retry-after") ?? NaN);
  return new Failure(message || `The server answered ${response.status} without a reason.`, {
    status: response.status,
    code,
    field,
    requestId: answer?.request_id ?? response.headers.get("x-request-id"),
    retryAfter: seconds > 0 ? seconds : null,
  });
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, {once: true});
  });
}
