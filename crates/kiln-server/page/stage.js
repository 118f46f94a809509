// What is painted now: preview, progress, time left, cancel; and what waits.

import { call, follow } from "./api.js";
import { $, button, clearFailure, fail, make, seconds, trying } from "./dom.js";

/** Orders that are not finished, by id: `{ id, prompt, view }`. */
const orders = new Map();
let onPicture = () => {};
let actionsFor = () => [];

const PHASES = {
  queue: "Waiting",
  load: "Loading the model",
  text: "Reading the prompt",
  encode: "Looking at the pictures",
  steps: "Painting",
  decode: "Finishing",
  save: "Saving",
};

export function listen(options) {
  ({ onPicture, actionsFor } = options);
  $("cancel").onclick = cancelCurrent;
}

/** The order that is painted, or the first that waits. */
const current = () => [...orders.values()].find((o) => o.view.status === "running") ?? [...orders.values()][0];

export function isBusy() {
  return orders.size > 0;
}

export async function cancelCurrent() {
  const order = current();
  if (order) await cancel(order.id);
}

async function cancel(id) {
  try {
    await call(`/v1/jobs/${id}`, { method: "DELETE" });
  } catch (error) {
    // It came to its end by itself.
    if (error.status !== 409 && error.status !== 404) fail(error.message);
  }
}

/** Takes orders up that this page left behind. */
export async function resume() {
  const { data } = await call("/v1/jobs?limit=20");
  for (const view of data.reverse()) if (view.status === "queued" || view.status === "running") watch(view);
}

export function watch(view) {
  const order = { id: view.id, view };
  orders.set(view.id, order);
  follow(view.id, {
    progress(now) {
      order.view = now;
      show();
    },
    preview({ image }) {
      if (current() === order) picture(image, `Preview of: ${words(view)}`, true);
    },
    picture(made) {
      onPicture(made);
    },
    end(last) {
      orders.delete(view.id);
      ended(last);
      show();
    },
    lost(error) {
      orders.delete(view.id);
      fail(error.message);
      show();
    },
  });
  show();
}

function ended(view) {
  $("notes").replaceChildren(...(view.notes ?? []).map((text) => make("li", { textContent: text })));
  if (view.status === "failed") return fail(`The picture failed: ${view.error?.message ?? "for an unknown reason"}`);
  if (view.status === "done") clearFailure();
  for (const made of view.pictures) onPicture(made);
  const made = view.pictures.at(-1);
  if (made) result(made);
  else if ($("picture").classList.contains("preview")) empty("Cancelled.");
}

/** Shows a finished picture, with what can be done with it. */
export function result(made) {
  picture(made.url, made.prompt, false);
  $("stage-actions").replaceChildren(...actionsFor(made));
  $("stage-actions").hidden = false;
}

function picture(source, alt, isPreview) {
  const image = $("picture");
  image.src = source;
  image.alt = alt;
  image.hidden = false;
  image.classList.toggle("preview", isPreview);
  $("stage-hint").hidden = true;
  $("figure").classList.remove("empty");
  if (isPreview) $("stage-actions").hidden = true;
}

function empty(hint) {
  $("picture").hidden = true;
  $("picture").classList.remove("preview");
  $("stage-hint").textContent = hint;
  $("stage-hint").hidden = false;
  $("figure").classList.add("empty");
  $("stage-actions").hidden = true;
}

/** A job's prompts in a line. */
const words = (view) => [view.order.prompt].flat().join(" · ");

function describe({ status, progress, position }) {
  if (status === "queued") return position ? `Waiting, ${position} before it` : "Waiting";
  if (!progress) return "Beginning";
  const parts = [PHASES[progress.phase]];
  if (progress.phase === "steps") parts[0] = `Step ${Math.min(progress.step + 1, progress.steps)} of ${progress.steps}`;
  if (progress.pictures > 1) parts.push(`picture ${progress.picture + 1} of ${progress.pictures}`);
  if (progress.time_left) parts.push(`about ${seconds(progress.time_left)} left`);
  return parts.join(" · ");
}

function show() {
  const order = current();
  $("working").hidden = !order;
  if (order) {
    const percent = Math.round(100 * (order.view.progress?.fraction ?? 0));
    $("bar").setAttribute("aria-valuenow", percent);
    $("bar-fill").style.width = `${percent}%`;
    const standing = describe(order.view);
    if ($("working-text").textContent !== standing) $("working-text").textContent = standing;
  }
  const rows = [...orders.values()].filter((o) => o !== order).map(row);
  const shown = $("waiting").children;
  // Rows stay while progress comes in: a button that is made anew under the pointer or the focus can't be pressed.
  if (rows.length !== shown.length || rows.some((r, i) => r !== shown[i])) $("waiting").replaceChildren(...rows);
  $("standing").textContent = orders.size > 1 ? `${orders.size} pictures to come` : "";
  document.title = order?.view.progress ? `${Math.round(100 * order.view.progress.fraction)} % · Kiln` : "Kiln";
}

/** The line of a waiting order: made once, its note kept true. */
function row(order) {
  order.row ??= make("li", {},
    make("span", { className: "words", textContent: words(order.view) }),
    make("span", { className: "note" }),
    button("✕", () => trying(() => cancel(order.id)), { className: "quiet icon", "aria-label": `Cancel: ${words(order.view)}` }));
  const note = order.row.querySelector(".note");
  const standing = describe(order.view);
  if (note.textContent !== standing) note.textContent = standing;
  return order.row;
}
