// The stage: preview, progress and result of the current job, and the queue.

import { call, follow } from "./api.js";
import { $, button, clearFailure, fail, make, seconds, trying } from "./dom.js";

/** Jobs that have not ended, by id: `{ id, view, row }`. */
const jobs = new Map();
let onImage = () => {};
let actionsFor = () => [];

const PHASES = {
  queue: "Queued",
  load: "Loading the model",
  text: "Encoding the prompt",
  encode: "Encoding the input images",
  steps: "Generating",
  decode: "Decoding",
  save: "Saving",
};

export function listen(options) {
  ({ onImage, actionsFor } = options);
  $("cancel").onclick = cancelCurrent;
}

/** The running job, or the first in the queue. */
const current = () => [...jobs.values()].find((job) => job.view.status === "running") ?? [...jobs.values()][0];

export function isBusy() {
  return jobs.size > 0;
}

export async function cancelCurrent() {
  const job = current();
  if (job) await cancel(job.id);
}

async function cancel(id) {
  try {
    await call(`/v1/jobs/${id}`, { method: "DELETE" });
  } catch (error) {
    // It has already ended.
    if (error.status !== 409 && error.status !== 404) fail(error.message);
  }
}

/** Watches jobs that were submitted before the page was loaded. */
export async function resume() {
  const { data } = await call("/v1/jobs?limit=20");
  for (const view of data.reverse()) if (view.status === "queued" || view.status === "running") watch(view);
}

export function watch(view) {
  const job = { id: view.id, view };
  jobs.set(view.id, job);
  follow(view.id, {
    progress(latest) {
      job.view = latest;
      show();
    },
    preview({ image }) {
      if (current() === job) showImage(image, `Preview of: ${prompts(view)}`, true);
    },
    picture(image) {
      onImage(image);
    },
    end(last) {
      jobs.delete(view.id);
      ended(last);
      show();
    },
    lost(error) {
      jobs.delete(view.id);
      fail(error.message);
      show();
    },
  });
  show();
}

function ended(view) {
  $("notes").replaceChildren(...(view.notes ?? []).map((text) => make("li", { textContent: text })));
  if (view.status === "failed") return fail(`The job failed: ${view.error?.message ?? "unknown error"}`);
  if (view.status === "done") clearFailure();
  for (const image of view.pictures) onImage(image);
  const image = view.pictures.at(-1);
  if (image) showResult(image);
  else if ($("image").classList.contains("preview")) showEmpty("Cancelled.");
}

/** Shows a finished image and its actions. */
function showResult(image) {
  showImage(image.url, image.prompt, false);
  $("stage-actions").replaceChildren(...actionsFor(image));
  $("stage-actions").hidden = false;
}

function showImage(source, alt, isPreview) {
  const element = $("image");
  element.src = source;
  element.alt = alt;
  element.hidden = false;
  element.classList.toggle("preview", isPreview);
  $("stage-hint").hidden = true;
  $("figure").classList.remove("empty");
  if (isPreview) $("stage-actions").hidden = true;
}

function showEmpty(hint) {
  $("image").hidden = true;
  $("image").classList.remove("preview");
  $("stage-hint").textContent = hint;
  $("stage-hint").hidden = false;
  $("figure").classList.add("empty");
  $("stage-actions").hidden = true;
}

/** A job's prompts in one line. */
const prompts = (view) => [view.order.prompt].flat().join(" · ");

function describe({ status, progress, position }) {
  if (status === "queued") return position ? `Queued, ${position} ahead` : "Queued";
  if (!progress) return "Starting";
  const parts = [PHASES[progress.phase]];
  if (progress.phase === "steps") parts[0] = `Step ${Math.min(progress.step + 1, progress.steps)} of ${progress.steps}`;
  if (progress.pictures > 1) parts.push(`image ${progress.picture + 1} of ${progress.pictures}`);
  if (progress.time_left) parts.push(`about ${seconds(progress.time_left)} left`);
  return parts.join(" · ");
}

function show() {
  const job = current();
  $("working").hidden = !job;
  if (job) {
    const percent = Math.round(100 * (job.view.progress?.fraction ?? 0));
    $("bar").setAttribute("aria-valuenow", percent);
    $("bar-fill").style.width = `${percent}%`;
    const text = describe(job.view);
    if ($("working-text").textContent !== text) $("working-text").textContent = text;
  }
  const rows = [...jobs.values()].filter((other) => other !== job).map(row);
  const shown = $("queue").children;
  // Keep the rows while progress comes in: a button that is replaced under the pointer or the focus can't be pressed.
  if (rows.length !== shown.length || rows.some((r, i) => r !== shown[i])) $("queue").replaceChildren(...rows);
  $("queue-status").textContent = jobs.size > 1 ? `${jobs.size} jobs` : "";
  document.title = job?.view.progress ? `${Math.round(100 * job.view.progress.fraction)} % · Kiln` : "Kiln";
}

/** The row of a queued job: created once, then updated. */
function row(job) {
  job.row ??= make("li", {},
    make("span", { className: "prompt", textContent: prompts(job.view) }),
    make("span", { className: "note" }),
    button("✕", () => trying(() => cancel(job.id)), { className: "quiet icon", "aria-label": `Cancel: ${prompts(job.view)}` }));
  const note = job.row.querySelector(".note");
  const text = describe(job.view);
  if (note.textContent !== text) note.textContent = text;
  return job.row;
}
