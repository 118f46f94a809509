// Whether the server answers. If it does not, a banner says so until it does.

import { $, setText, sleep } from "./dom.js";

/** The longest wait for a sign of life, and the pauses between two attempts: the first, and the longest. In milliseconds. */
const [TIMEOUT, PAUSE, LONGEST] = [5000, 1000, 8000];
const SILENT = "The server does not answer. Trying again…";
const AWAY = "The server can't be reached. Trying again…";
const OFFLINE = "This device is offline. Trying again…";
let reachable = true;
/** The running attempts to reach the server; resolves once it answers. */
let attempts = null;
/** Ends the pause before the next attempt. */
let hurry = () => {};
const listeners = [];

export const isReachable = () => reachable;

/** Calls `listener` when the server goes away or comes back. */
export function onChange(listener) {
  listeners.push(listener);
}

function set(problem) {
  if (problem) setText($("offline-text"), problem);
  if (reachable === !problem) return;
  reachable = !problem;
  $("offline").hidden = reachable;
  for (const listener of listeners) listener(reachable);
}

/** Asks for a sign of life; returns what is wrong, or null. */
export async function problem() {
  try {
    return (await fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) })).ok ? null : AWAY;
  } catch (error) {
    if (error.name === "TimeoutError") return SILENT;
    return navigator.onLine ? AWAY : OFFLINE;
  }
}

/** Checks whether the server answers, and waits until it does. */
export function untilReachable() {
  attempts ??= (async () => {
    let found;
    for (let pause = PAUSE; (found = await problem()); pause = Math.min(2 * pause, LONGEST)) {
      set(found);
      await Promise.race([sleep(pause), new Promise((resolve) => (hurry = resolve))]);
    }
    set(null);
    attempts = null;
  })();
  return attempts;
}

export function listen() {
  addEventListener("offline", untilReachable);
  addEventListener("online", () => hurry());
  // A sleeping device wakes up with a long pause ahead.
  document.addEventListener("visibilitychange", () => document.hidden || hurry());
}
