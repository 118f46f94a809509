// The stage: preview, progress and results of the current job.

import { isReachable } from "./connection.js";
import { $, button, make, seconds, setText } from "./dom.js";
import * as jobs from "./jobs.js";
import { exclusive, fail, notifyOutside } from "./notices.js";
import { makeImage, showImage as load } from "./image.js";

let onImage = () => {};
let open = () => {};
let actionsFor = () => [];
/** The job whose preview is shown. */
let previewed = null;
/** The job whose images fill the grid, and the tiles by number. */
let grid = { job: null, tiles: [] };

const PHASES = {
  queue: "Queued",
  load: "Loading the model",
  text: "Encoding the prompt",
  encode: "Encoding the input images",
  steps: "Generating",
  decode: "Decoding",
  save: "Saving",
};

/** A job's prompts in one line. */
export const prompts = (view) => [...new Set([view.request.prompt].flat())].join(" · ");

/** The number of images of a job. */
const count = ({ request }) => {
  const [texts, seeds] = [[request.prompt].flat().length, [request.seed].flat().length];
  return request.n ? texts * request.n : Math.max(texts, seeds);
};

export function describe({ status, progress, position }) {
  if (status === "queued") return position ? `Queued, ${position} ahead` : "Queued";
  if (!progress) return "Starting";
  const parts = [PHASES[progress.phase]];
  if (progress.phase === "steps") parts[0] = `Step ${Math.min(progress.step + 1, progress.steps)} of ${progress.steps}`;
  if (progress.tiles > 1) parts.push(`tile ${progress.tile} of ${progress.tiles}`);
  if (progress.images > 1) parts.push(`image ${progress.image + 1} of ${progress.images}`);
  if (progress.time_left) parts.push(`about ${seconds(progress.time_left)} left`);
  return parts.join(" · ");
}

/** Shows the progress of the current job. */
export function showProgress() {
  const view = jobs.current();
  $("working").hidden = !view;
  $("working").classList.toggle("stale", !isReachable());
  const percent = Math.round(100 * (view?.progress?.fraction ?? 0));
  document.title = view?.progress && isReachable() ? `${percent} % · Kiln` : "Kiln";
  if (!view) return;
  if (view.status === "running") showNotes(view);
  $("bar").setAttribute("aria-valuenow", percent);
  $("bar-fill").style.width = `${percent}%`;
  setText($("working-text"), isReachable() ? describe(view) : "Connection lost. The job continues if the server is running.");
}

export function showPreview(id, { number, image }) {
  const view = jobs.current();
  if (view?.id !== id) return;
  const alt = `Preview of: ${prompts(view)}`;
  previewed = id;
  if (count(view) === 1) return showImage(image, alt, true);
  fillGrid(view);
  const tile = grid.tiles[number];
  if (tile && !tile.dataset.image) showTile(tile, { src: image, alt, className: "preview" });
}

/** Shows a finished image of a job that goes on. */
export function addImage(id, image) {
  onImage(image);
  const view = jobs.current();
  if (view?.id !== id || count(view) === 1) return;
  fillGrid(view);
  finishTile(image);
}

/** Shows the grid of a job with several images. */
function fillGrid(view) {
  if (grid.job === view.id) return;
  grid = { job: view.id, tiles: Array.from({ length: count(view) }, (_, i) => make("li", {}, make("span", { className: "note", textContent: i + 1 }))) };
  const number = grid.tiles.length;
  $("results").style.setProperty("--columns", number < 4 ? number : Math.ceil(Math.sqrt(number)));
  $("results").replaceChildren(...grid.tiles);
  showOnly("results");
  $("stage-actions").hidden = true;
}

function showTile(tile, properties) {
  const image = tile.querySelector("img") ?? make("img");
  if (!image.parentElement) tile.replaceChildren(image);
  Object.assign(image, properties);
}

function finishTile(image) {
  const tile = grid.tiles[image.number];
  if (!tile || tile.dataset.image === image.id) return;
  tile.dataset.image = image.id;
  const show = button("", () => open(image), { className: "open", title: image.prompt });
  show.append(makeImage(image.url, { alt: image.prompt }));
  tile.replaceChildren(show, make("span", { className: "seed-label", textContent: `seed ${image.seed}` }));
}

/** Shows what the server has to say about a job: under the prompt, or under the image where that is out of sight. */
function showNotes({ notes = [] }) {
  const text = notes.join("\n");
  for (const list of [$("notes"), $("prompt-notes")]) {
    // Screen readers announce every change.
    if (list.dataset.text === text) continue;
    list.dataset.text = text;
    list.replaceChildren(...notes.map((note) => make("li", { textContent: note.charAt(0).toUpperCase() + note.slice(1) })));
  }
}

export function showEnded(view) {
  showNotes(view);
  for (const image of view.images) onImage(image);
  if (view.status === "failed") {
    fail(`The job failed: ${view.error?.message ?? "unknown error"}`);
    notifyOutside("The job failed", prompts(view));
    if (!view.images.length) return showEmpty("Failed.");
  }
  if (view.status === "done") {
    const number = view.images.length;
    notifyOutside(number > 1 ? `${number} images are ready` : "The image is ready", prompts(view), view.images[0]?.thumbnail);
  }
  if (count(view) > 1 && view.images.length) {
    fillGrid(view);
    for (const image of view.images) finishTile(image);
    grid.tiles.filter((tile) => !tile.dataset.image).forEach((tile) => tile.remove());
  } else if (view.images.length) {
    showResult(view.images[0]);
  } else if (previewed === view.id) {
    showEmpty("Cancelled.");
  }
}

/** Shows a finished image and its actions. */
function showResult(image) {
  showImage(image.url, image.prompt, false);
  $("stage-open").onclick = () => open(image);
  $("stage-actions").replaceChildren(...actionsFor(image));
  $("stage-actions").hidden = false;
}

function showImage(source, alt, isPreview) {
  const element = $("image");
  load(element, source);
  element.alt = alt;
  element.classList.toggle("preview", isPreview);
  $("stage-open").disabled = isPreview;
  showOnly("stage-open");
  grid = { job: null, tiles: [] };
  if (isPreview) $("stage-actions").hidden = true;
}

function showEmpty(hint) {
  $("image").classList.remove("preview");
  $("stage-hint").textContent = hint;
  showOnly("stage-hint");
  grid = { job: null, tiles: [] };
  $("stage-actions").hidden = true;
}

function showOnly(id) {
  for (const other of ["stage-open", "results", "stage-hint"]) $(other).hidden = other !== id;
  $("figure").classList.toggle("empty", id === "stage-hint");
}

export async function cancelCurrent() {
  const view = jobs.current();
  if (view) await jobs.cancel(view.id);
}

export function listen(options) {
  ({ onImage, open, actionsFor } = options);
  $("cancel").onclick = exclusive(cancelCurrent);
}
