// Calls to the server. Every one has a time limit; what is harmless to repeat is repeated.

import { problem, untilReachable } from "./connection.js";
import { memory, sleep } from "./dom.js";
import { askForKey } from "./session.js";

const client = memory.get("client") ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
memory.set("client", client);
/** Silence after which the server is asked for a sign of life, in ms. */
const PATIENCE = 5000;
/** The longest waits, in ms: for an answer of a server that is alive, of one that was away, and for one that is away. */
const [LIMIT, RETURN, AWAY] = [60_000, 10_000, 20_000];
/** The longest time for a file, in ms. */
const FILE = 600_000;
/** Answers of a server, or of a proxy before it, that has no time at the moment. */
const BUSY = [429, 502, 503, 504];
/** Pauses before a call is repeated, in ms; there are no more repetitions. */
const PAUSES = [500, 1000, 2000, 4000];

/** An answer that never came. */
class NoAnswer extends Error {}

/**
 * Watches a call: `abort` gets an error if the server is alive without answering it. While the server is away, a banner
 * says so and the call goes on: a server that was only stopped answers then. Returns `heard`, for signs of progress, and
 * `stop`.
 */
export function watch(limit, abort) {
  let [timer, since, longest, stopped] = [null, Date.now(), limit, false];
  const look = async () => {
    const isAway = (await problem()) !== null;
    if (isAway) {
      await untilReachable();
      // What was sent before may be lost.
      [since, longest] = [Date.now(), Math.min(limit, RETURN)];
    }
    if (stopped) return;
    if (Date.now() - since > longest) abort(new NoAnswer("The server did not answer this request."));
    else timer = setTimeout(look, PATIENCE);
  };
  timer = setTimeout(look, PATIENCE);
  return {
    heard() {
      [since, longest] = [Date.now(), limit];
    },
    stop() {
      stopped = true;
      clearTimeout(timer);
    },
  };
}

/** One attempt of a call with `fetch`. */
async function exchange(path, { limit, read, ...options }) {
  const controller = new AbortController();
  const watched = watch(limit, (error) => controller.abort(error));
  try {
    const response = await fetch(path, { ...options, signal: controller.signal });
    const { ok, status, statusText } = response;
    const isEmpty = status === 204 || options.method === "HEAD";
    return { ok, status, statusText, body: isEmpty ? null : await (ok ? response[read]() : response.text()) };
  } finally {
    watched.stop();
  }
}

/** The error of a response. */
function refusal({ status, statusText, body }) {
  let message = `${status} ${statusText}`;
  try {
    message = JSON.parse(body).error.message;
  } catch {
    // Not the server's format; perhaps a proxy's response.
  }
  const error = new Error(message.charAt(0).toUpperCase() + message.slice(1));
  error.status = status;
  return error;
}

/**
 * Calls the server; throws an error with the server's message. Calls that only read, and those with `again`, are repeated
 * if the connection breaks; those with `once` only if the server is there. `read` names the form of the answer, `limit`
 * the longest wait for it, `by` another way to send it.
 */
export async function call(path, { again = false, once = false, read = "json", limit = read === "blob" ? FILE : LIMIT, by = exchange, ...options } = {}) {
  const isRead = !options.method || options.method === "GET" || options.method === "HEAD";
  const sent = { ...options, limit, read, headers: { "x-client-id": client, ...options.headers } };
  for (let attempt = 0; ; attempt++) {
    const more = attempt < PAUSES.length;
    try {
      const answer = await by(path, sent);
      if (answer.ok) return answer.body;
      if (answer.status === 401) {
        await askForKey();
        continue;
      }
      if (!((isRead || again) && more && BUSY.includes(answer.status))) throw refusal(answer);
    } catch (error) {
      if (error.status) throw error;
      const found = error instanceof NoAnswer ? null : await problem();
      const back = untilReachable();
      if (isRead || again) {
        // What the user gave to the page waits as long as it takes.
        if (found) await (again ? back : Promise.race([back, sleep(AWAY)]));
        if (!more || (found && !again && (await problem()))) throw failure(error);
      } else if (!once || attempt || found) {
        throw failure(error);
      }
    }
    await sleep(PAUSES[Math.min(attempt, PAUSES.length - 1)]);
  }
}

const failure = (error) => (error instanceof NoAnswer ? error : new Error("The server can't be reached. Is it still running?"));

/** Sends JSON: a value, or text that is JSON already. */
export const send = (method, path, body, options = {}) => call(path, {
  method,
  ...options,
  headers: { "content-type": "application/json", ...options.headers },
  body: typeof body === "string" ? body : JSON.stringify(body),
});

/** Submits a job. Its key makes it one job, even if it is sent again because no answer came. */
export const submitJob = (path, body) =>
  send("POST", path, body, { once: true, headers: { "idempotency-key": crypto.getRandomValues(new Uint32Array(4)).join("-") } });
