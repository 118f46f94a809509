// Whether the server answers. If it does not, a banner says so until it does.

import { $ } from "./dom.js";

/** Time between two attempts and the longest wait for an answer, in milliseconds. */
const [INTERVAL, TIMEOUT] = [1500, 5000];
let reachable = true;
/** The running attempts to reach the server; resolves once it answers. */
let attempts = null;
const listeners = [];

export const isReachable = () => reachable;

/** Calls `listener` when the server goes away or comes back. */
export function onChange(listener) {
  listeners.push(listener);
}

function set(state) {
  if (reachable === state) return;
  reachable = state;
  $("offline").hidden = reachable;
  for (const listener of listeners) listener(reachable);
}

async function answers() {
  try {
    return (await fetch("/healthz", { signal: AbortSignal.timeout(TIMEOUT) })).ok;
  } catch {
    return false;
  }
}

/** Checks whether the server answers, and waits until it does. */
export function untilReachable() {
  attempts ??= (async () => {
    while (!(await answers())) {
      set(false);
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    }
    set(true);
    attempts = null;
  })();
  return attempts;
}
