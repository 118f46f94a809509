// Entry point: connects the modules of the page.

import { call } from "./api.js";
import { $, clearFailure, memory, trying } from "./dom.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as inputs from "./inputs.js";
import * as stage from "./stage.js";
import * as viewer from "./viewer.js";

function theme(name) {
  document.documentElement.dataset.theme = name;
}

const system = matchMedia("(prefers-color-scheme: dark)");
theme(memory.get("theme") ?? (system.matches ? "dark" : "light"));
system.onchange = () => memory.get("theme") ?? theme(system.matches ? "dark" : "light");
$("theme").onclick = () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  memory.set("theme", other);
  theme(other);
};

async function generate() {
  clearFailure();
  const { request, seed } = form.request();
  Object.assign(request, await inputs.fields());
  const body = form.toJson(request, seed);
  const view = await call("/v1/jobs", { method: "POST", headers: { "content-type": "application/json" }, body });
  stage.watch(view);
  // On a phone the stage is below the form.
  if (matchMedia("(max-width: 900px)").matches) $("figure").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

/** Whether a job is being submitted: one click is one job, however long the upload takes. */
let sending = false;
$("form").onsubmit = async (event) => {
  event.preventDefault();
  if (sending || !$("form").reportValidity()) return;
  sending = true;
  await trying(generate);
  sending = false;
};

/** Fills the form with the settings of an image. */
async function reuseSettings(image) {
  const request = image.order;
  // Of a job with several prompts or seeds, generate only this image.
  const one = Array.isArray(request.prompt) || Array.isArray(request.seed);
  form.fill({
    ...request,
    prompt: image.prompt,
    negative_prompt: viewer.valueFor(image, request.negative_prompt),
    seed: image.seed ?? request.seed,
    n: one ? 1 : request.n,
  });
  inputs.restore(request);
  form.lockSeed(true);
  $("prompt").focus();
}

form.listen();
inputs.listen();
viewer.listen({
  useAsReference: (image) => inputs.addGenerated(image),
  useAsInitial: (image) => inputs.addGenerated(image, true),
  reuseSettings,
});
gallery.listen({ open: viewer.open, compare: viewer.compare });
stage.listen({ onImage: gallery.add, actionsFor: viewer.actionsFor });

for (const close of document.querySelectorAll("[data-close]")) close.onclick = () => close.closest("dialog").close();
$("alert-close").onclick = clearFailure;
$("help").onclick = () => $("shortcuts").showModal();

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!document.querySelector("dialog[open]")) $("form").requestSubmit();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && stage.isBusy()) return void stage.cancelCurrent();
  if (event.target.matches("input:not([type=range], [type=checkbox]), textarea, select") || event.ctrlKey || event.altKey || event.metaKey) return;
  const keys = {
    p: () => $("prompt").focus(),
    "/": () => $("search").focus(),
    d: form.rollSeed,
    l: () => form.lockSeed(),
    "?": () => $("help").click(),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

await trying(form.prepare);
await Promise.all([trying(() => gallery.load()), trying(stage.resume)]);
document.body.dataset.ready = "true";
