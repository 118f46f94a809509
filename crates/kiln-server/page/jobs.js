// The jobs of this browser that have not ended. One of them is followed by its events, the others by asking now and
// then: a browser has few connections to a server. Their ids are saved: a server without keys can't tell browsers apart.

import { call, send } from "./api.js";
import { onChange } from "./connection.js";
import { memory } from "./dom.js";
import { follow } from "./events.js";
import { fail } from "./notices.js";

/** Time between two looks at the queue, in milliseconds. */
const INTERVAL = 2000;
/** How many ids are saved. */
const SAVED = 200;
/** Views by id, in the order of the queue. */
let jobs = new Map();
/** Jobs that have ended. An answer on its way may still list them. */
const ended = new Set();
/** The last exchange about the queue. Each waits for the one before: its answer is newer. */
let exchange = Promise.resolve();
/** The job that is followed, and the function that stops that. */
let followed = { id: null, stop() {} };
let timer = null;
/** Tells the other windows of this browser about a new order. */
const windows = new BroadcastChannel("kiln.queue");
let on = { changed() {}, preview() {}, image() {}, ended() {} };

const isFinal = ({ status }) => status !== "queued" && status !== "running";

export const all = () => [...jobs.values()];

/** The running job, or the first in the queue. */
export const current = () => all().find((view) => view.status === "running") ?? all()[0];

/** This browser's jobs of a list. */
function own(views) {
  // Another window may have submitted some meanwhile.
  const ids = memory.get("jobs") ?? [];
  return views.filter(({ id }) => !ended.has(id) && (ids.includes(id) || jobs.has(id)));
}

/** Starts to watch a job of this browser. */
export function watch(view) {
  jobs.set(view.id, view);
  memory.set("jobs", [view.id, ...(memory.get("jobs") ?? [])].slice(0, SAVED));
  update();
}

function update() {
  const view = current();
  if (view?.id !== followed.id) {
    followed.stop();
    followed = { id: view?.id ?? null, stop: view ? open(view.id) : () => {} };
  }
  clearTimeout(timer);
  if (jobs.size > 1) timer = setTimeout(look, INTERVAL);
  on.changed();
}

function open(id) {
  const handlers = {
    progress(view) {
      jobs.set(id, view);
      on.changed();
    },
    preview: (preview) => on.preview(id, preview),
    image: (image) => on.image(id, image),
    end,
    lost(error) {
      jobs.delete(id);
      fail(error.message);
      update();
    },
  };
  return follow(`/v1/jobs/${id}`, { query: "?previews=true", isFinal, on: handlers });
}

function end(view) {
  if (!jobs.delete(view.id)) return;
  ended.add(view.id);
  if (followed.id === view.id) followed = { id: null, stop() {} };
  on.ended(view);
  update();
}

/** Runs an exchange about the queue after those before it. */
function inTurn(act) {
  const done = exchange.then(act);
  exchange = done.catch(() => {});
  return done;
}

/** Takes over the server's queue, with jobs that were submitted before the page was loaded or in another window. */
export const refresh = () => inTurn(() => take(call("/v1/queue")));

/** Looks at the queue: positions change, and jobs end that are not followed. */
async function look() {
  try {
    await refresh();
  } catch {
    // The connection's banner tells.
    update();
  }
}

/** Takes over the list of jobs that the server answers. */
async function take(answer) {
  const before = new Map(jobs);
  // An event that came while the answer was on its way may be newer.
  const newer = (view) => (jobs.get(view.id) === before.get(view.id) ? view : jobs.get(view.id) ?? view);
  const views = own((await answer).data).map(newer);
  const gone = all().filter(({ id }) => id !== followed.id && !views.some((view) => view.id === id));
  const order = views.map((view) => [view.id, view]);
  const rest = [...jobs].filter(([id]) => !views.some((view) => view.id === id));
  jobs = new Map([...order, ...rest]);
  for (const { id } of gone) {
    try {
      const view = await call(`/v1/jobs/${id}`);
      if (isFinal(view)) end(view);
    } catch (error) {
      // Any other error says nothing about the job.
      if (error.status === 404 || error.status === 403) jobs.delete(id);
    }
  }
  update();
}

export async function cancel(id) {
  try {
    const view = await call(`/v1/jobs/${id}`, { method: "DELETE" });
    if (id !== followed.id && view.status === "cancelled") end(view);
  } catch (error) {
    // It has already ended.
    if (error.status !== 409 && error.status !== 404) throw error;
  }
}

/** Cancels all jobs of this browser; waiting ones first, so that none of them starts when the running one ends. */
export async function cancelAll() {
  for (const { id } of all().reverse()) await cancel(id);
}

/** Gives queued jobs their places in the order of ids that `arrange` returns, if any, once the server's order is known. */
export const reorder = (arrange) => inTurn(async () => {
  // Another window may have changed it.
  await take(call("/v1/queue"));
  const order = arrange();
  if (!order) return;
  await take(send("PUT", "/v1/queue", { order }));
  windows.postMessage("changed");
});

export function listen(handlers) {
  on = handlers;
  onChange((reachable) => {
    on.changed();
    if (reachable) refresh().catch(() => {});
  });
  windows.onmessage = () => jobs.size && look();
}
