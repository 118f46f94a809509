// Streams of events: a job or a training is followed until its end, also over an interruption.

import { call } from "./api.js";
import { untilReachable } from "./connection.js";
import { memory, sleep } from "./dom.js";

/** Silence after which the server is asked for the state, and the pauses before a stream is opened again, in ms. */
const [SILENCE, PAUSE, LONGEST] = [15_000, 1000, 15_000];
/** Time between two looks at what a hidden page follows, in ms. */
const HIDDEN = 4000;

/**
 * Follows the job or training at `path`: calls `on[name]` for its events, and finally `on.end` or, if the server has it no
 * longer, `on.lost`. `isFinal` tells whether a view is the last one. If the server goes away, events continue when it is
 * back. Returns a function that stops it.
 */
export function follow(path, { query = "", isFinal, on }) {
  let [source, timer, stopped, reopening, pause, latest] = [null, null, false, false, PAUSE, ""];
  const close = () => {
    // Of both kinds.
    clearTimeout(timer);
    source?.close();
  };
  const end = (finish, value) => {
    stopped = true;
    document.removeEventListener("visibilitychange", change);
    close();
    finish?.(value);
  };
  const reopen = async () => {
    if (reopening || stopped) return;
    reopening = true;
    close();
    await sleep(pause);
    pause = Math.min(2 * pause, LONGEST);
    await untilReachable();
    try {
      const view = stopped ? null : await call(path);
      reopening = false;
      if (stopped) return;
      if (isFinal(view)) end(on.end, view);
      else open();
    } catch (error) {
      reopening = false;
      if (stopped) return;
      // Any other error may pass: the server starts again, or has no time.
      if (error.status === 404 || error.status === 403) end(on.lost, error);
      else reopen();
    }
  };
  /** What tells whether a view is newer than another. */
  const state = ({ status, step, progress }) => JSON.stringify([status, step, progress?.phase, progress?.step, progress?.image]);
  /** Asks now and then. A browser has few connections to a server, and every window would hold some. */
  const poll = async () => {
    const view = await call(path).catch(() => null);
    if (stopped || !document.hidden) return;
    if (view && isFinal(view)) return void end(on.end, view);
    if (view) (on.state ?? on.progress)(view);
    timer = setTimeout(poll, HIDDEN);
  };
  const open = () => {
    // Who wants to be notified wants it at once.
    if (document.hidden && !memory.get("notify")) return void poll();
    let heard = Date.now();
    source = new EventSource(`${path}/events${query}`);
    for (const name of Object.keys(on).filter((name) => name !== "end" && name !== "lost")) {
      source.addEventListener(name, (event) => {
        [heard, pause] = [Date.now(), PAUSE];
        const data = JSON.parse(event.data);
        if (data.status) latest = state(data);
        on[name](data);
      });
    }
    source.addEventListener("end", (event) => {
      const view = JSON.parse(event.data);
      // One that is not final waits for the next start of the server.
      if (isFinal(view)) end(on.end, view);
      else reopen();
    });
    source.onerror = reopen;
    // A connection may die without an error; then the server knows more than this page.
    timer = setInterval(async () => {
      if (Date.now() - heard < SILENCE) return;
      heard = Date.now();
      const view = await call(path).catch(() => null);
      if (view && state(view) !== latest) reopen();
    }, SILENCE / 3);
  };
  const change = () => {
    if (reopening || stopped) return;
    close();
    open();
  };
  document.addEventListener("visibilitychange", change);
  open();
  return () => end();
}
