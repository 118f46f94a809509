// Trainings: the list, and one of them with its loss curve and samples.

import { call, send } from "./api.js";
import { draw } from "./chart.js";
import { $, button, make, openDialog, seconds, setText, whenReleased } from "./dom.js";
import { follow as followEvents } from "./events.js";
import * as form from "./form.js";
import * as loras from "./loras.js";
import { exclusive, fail, note, notifyOutside, trying } from "./notices.js";
import { makeImage } from "./image.js";
import { insertWord } from "./prompts.js";
import * as trainForm from "./train-form.js";

const STATES = { queued: "Queued", preparing: "Preparing", running: "Training", done: "Done", failed: "Failed", cancelled: "Cancelled", interrupted: "Interrupted" };
const isActive = ({ status }) => ["queued", "preparing", "running"].includes(status);

/** All trainings, newest first. */
let list = [];
/** The training that is shown, with its losses and samples. */
let shown = null;
/** The training that is followed, and the function that stops that. */
let followed = { id: null, stop() {} };
let frame = 0;
/** The training that was chosen last: the answer for an earlier one may come later. */
let chosen = null;

function describe(view) {
  const { status, paused, position, preparing, step, steps, loss } = view;
  if (paused) return status === "queued" ? "Waits until no image job is left" : `Paused at step ${step}: image jobs go first`;
  if (status === "interrupted") return step ? `Stopped at step ${step} of ${steps}, when the server ended. Resume goes on from the last checkpoint, if there is one.` : "The server ended before the first step.";
  if (status === "queued") return position ? `Queued, ${position} ahead` : "Queued";
  if (status === "preparing") return preparing ? `Encoding ${preparing.what}, ${preparing.done} of ${preparing.total}` : "Loading the model";
  const parts = [`Step ${step} of ${steps}`];
  if (loss !== null && loss !== undefined) parts.push(`loss ${loss.toFixed(4)}`);
  if (view.seconds_per_step) parts.push(`${view.seconds_per_step < 1 ? view.seconds_per_step.toFixed(2) : view.seconds_per_step.toFixed(1)} s a step`);
  if (view.seconds_left) parts.push(`about ${seconds(view.seconds_left)} left`);
  return parts.join(" · ");
}

/** Replaces a training in the list, and shows it. */
function update(view) {
  const index = list.findIndex(({ id }) => id === view.id);
  if (index >= 0) list[index] = view;
  if (shown?.id === view.id) shown = { ...view, losses: shown.losses, samples: view.samples.length ? view.samples : shown.samples };
  showSoon();
}

function showSoon() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => whenReleased(show));
}

export function show() {
  const active = list.find((view) => view.status === "running");
  setText($("train-open"), active ? `Train ${Math.floor((100 * active.step) / Math.max(1, active.steps))} %` : "Train");
  if (!$("train").open) return;
  showList();
  $("train-form").hidden = shown !== null;
  $("train-view").hidden = shown === null;
  setText($("train-title"), shown ? shown.request.name : "Train a LoRA");
  $("train-new").hidden = shown === null;
  if (shown) showTraining(shown);
}

/** The list is rebuilt only if it says something new: a button that is replaced under the pointer can't be pressed. */
function showList() {
  const entries = list.map((view) => [view.id, `${view.request.name} · ${STATES[view.status]}`]);
  const text = JSON.stringify([entries, shown?.id]);
  $("train-list-field").hidden = list.length === 0;
  if ($("train-list").dataset.text === text) return;
  $("train-list").dataset.text = text;
  const focused = document.activeElement?.dataset?.training;
  $("train-list").replaceChildren(...entries.map(([id, name]) => {
    const entry = button(name, () => trying(() => select(id)), { className: "entry", "aria-pressed": shown?.id === id });
    entry.dataset.training = id;
    return make("li", {}, entry);
  }));
  if (focused) $("train-list").querySelector(`[data-training="${focused}"]`)?.focus();
}

function showTraining(view) {
  const percent = Math.round((100 * view.step) / Math.max(1, view.steps));
  setText($("train-status"), STATES[view.status]);
  setText($("train-text"), view.error ? view.error.message : describe(view));
  $("train-text").classList.toggle("wrong", Boolean(view.error));
  $("train-bar").setAttribute("aria-valuenow", percent);
  $("train-bar-fill").style.width = `${percent}%`;
  draw($("train-chart"), view.losses, view.steps);
  const urls = view.samples.map(({ url }) => url).join();
  if ($("train-samples").dataset.urls !== urls) {
    $("train-samples").dataset.urls = urls;
    $("train-samples").replaceChildren(...[...view.samples].reverse().map(({ step, url }) => make("li", {}, make("figure", {},
      make("a", { href: url, target: "_blank", rel: "noreferrer" }, makeImage(url, { alt: `Samples of step ${step}`, loading: "lazy" })), make("figcaption", { textContent: `Step ${step}` })))));
  }
  $("train-samples-field").hidden = view.samples.length === 0;
  const { request, check } = view;
  $("train-notes").replaceChildren(...[...check.warnings, ...view.notes].map((text) => make("li", { textContent: text })));
  const facts = [["Base model", request.model], ["Images", `${view.images}: ${check.sizes.join(", ")}`], ["Trigger", request.trigger], ["Rank", request.rank], ["Layers", request.targets], ["Learning rate", request.learning_rate], ["Cost", check.cost], ["LoRA", view.lora], ["Started", new Date(view.created).toLocaleString()]];
  const text = JSON.stringify(facts);
  if ($("train-facts").dataset.text !== text) {
    $("train-facts").dataset.text = text;
    $("train-facts").replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  }
  const lora = view.status === "done" ? loras.find(view.lora) : undefined;
  $("train-use").hidden = !lora;
  loras.showTools(lora, $("train-download"), $("train-lora-delete"));
  $("train-cancel").hidden = !isActive(view);
  $("train-resume").hidden = !["cancelled", "interrupted", "failed"].includes(view.status);
  $("train-delete").hidden = isActive(view);
}

/** Shows a training. */
async function select(id) {
  chosen = id;
  const view = await call(`/v1/trainings/${id}`);
  if (view.lora && !loras.find(view.lora)) await form.reloadLoras();
  if (chosen !== id) return;
  shown = view;
  update(shown);
  if (isActive(shown)) follow(id);
}

/** Follows a training by its events. */
function follow(id) {
  if (followed.id === id) return;
  followed.stop();
  const take = (whole) => (view) => {
    if (shown?.id === id) shown.losses = whole ? view.losses : [...shown.losses.filter(([step]) => step <= view.step), ...view.losses];
    update(view);
  };
  const on = {
    state: take(true),
    progress: take(false),
    async end(view) {
      followed = { id: null, stop() {} };
      // First, so that the buttons for it come with the end.
      if (view.lora) await trying(form.reloadLoras);
      take(true)(view);
      announce(view);
      trying(load);
    },
    lost() {
      // Deleted elsewhere.
      followed = { id: null, stop() {} };
      trying(load);
    },
  };
  followed = { id, stop: followEvents(`/v1/trainings/${id}`, { isFinal: (view) => !isActive(view), on }) };
}

function announce(view) {
  if (view.status === "done") {
    // The open view has its own button.
    if (!$("train").open || shown?.id !== view.id) note(`The LoRA “${view.lora}” is ready.`, "Use it", () => use(view));
    notifyOutside("Training done", `The LoRA “${view.lora}” is ready.`);
  } else if (view.status === "failed") {
    fail(`The training “${view.request.name}” failed: ${view.error.message}`);
  }
}

/** Fetches the list, and follows the training that runs. */
async function load() {
  list = (await call("/v1/trainings")).data;
  const now = list.find(({ id }) => id === shown?.id);
  if (!now) shown = null;
  else if (!isActive(now)) shown = await call(`/v1/trainings/${now.id}`);
  const active = list.filter(isActive);
  const next = active.find(({ status }) => status !== "queued") ?? active[active.length - 1];
  if (shown && isActive(shown)) follow(shown.id);
  else if (next) follow(next.id);
  show();
}

/** Selects the LoRA in the form, with the model it is made for and the trigger word in the prompt. */
async function use(view) {
  await form.reloadLoras();
  await form.reloadModels();
  const base = trainForm.model(view.request.model);
  form.selectModel(base?.use_with ?? view.request.model);
  loras.use(view.lora);
  const { trigger } = view.request;
  if (trigger && !$("prompt").value.includes(trigger)) insertWord(trigger);
  $("train").close();
  $("prompt").focus();
}

const act = (action) => exclusive(async () => {
  const { id } = shown;
  update(await send("POST", `/v1/trainings/${id}/${action}`, {}));
  await select(id);
  await load();
});

/** Deletes a training, after a question. */
function remove() {
  const { id, request } = shown;
  note(`Delete the images, checkpoints and samples of “${request.name}”? Its LoRA stays.`, "Delete", async () => {
    await call(`/v1/trainings/${id}`, { method: "DELETE" });
    if (shown?.id === id) shown = null;
    await load();
    note(`The training “${request.name}” is deleted.`);
  });
}

/** Offers training, if the server allows it to this client. */
export async function prepare() {
  if (!form.limits().train) return;
  $("train-open").hidden = false;
  await load();
  // The models tell what a finished LoRA is used with.
  if (list.length) await trainForm.prepare();
}

export function listen() {
  addEventListener("resize", showSoon);
  trainForm.listen((view) => {
    list = [view, ...list];
    trying(() => select(view.id));
  });
  $("train-open").onclick = () => trying(async () => {
    openDialog($("train"));
    await trainForm.prepare();
    const active = list.find(isActive);
    if (!shown && active) await select(active.id);
    await load();
  });
  $("train-new").onclick = () => {
    shown = chosen = null;
    show();
    $("train-name").focus();
  };
  $("train-use").onclick = exclusive(() => use(shown));
  $("train-cancel").onclick = act("cancel");
  $("train-resume").onclick = act("resume");
  $("train-lora-delete").onclick = () => loras.askToDelete(shown.lora);
  $("train-delete").onclick = remove;
}
