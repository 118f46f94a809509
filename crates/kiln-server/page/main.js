// Entry point: connects the modules of the page.

import { call, submitJob } from "./api.js";
import * as comparison from "./compare.js";
import * as connection from "./connection.js";
import { $, memory, openDialog, sleep, whenReleased } from "./dom.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as inputs from "./inputs.js";
import * as jobs from "./jobs.js";
import * as keys from "./keys.js";
import * as loras from "./loras.js";
import * as models from "./models.js";
import * as notices from "./notices.js";
import * as plot from "./plot.js";
import * as prompts from "./prompts.js";
import * as queue from "./queue.js";
import * as rewrite from "./rewrite.js";
import * as seed from "./seed.js";
import * as session from "./session.js";
import * as stage from "./stage.js";
import * as train from "./train.js";
import * as viewer from "./viewer.js";

const { clearFailures, exclusive, fail, trying } = notices;

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
  clearFailures("submit");
  const request = form.request();
  prompts.remember(request.prompt);
  request.prompt = prompts.styled(request.prompt);
  request.original_prompt = rewrite.original();
  Object.assign(request, await inputs.fields());
  jobs.watch(await submitJob("/v1/jobs?wildcards=true", seed.toJson(request, seed.next())));
  // On a phone the stage may be out of sight.
  if (matchMedia("(max-width: 900px)").matches) $("stage").scrollIntoView({ block: "start", behavior: "smooth" });
}

/** The requests that are being submitted: a second click on the same one is no second job, however long that takes. */
const sending = new Set();
$("form").onsubmit = async (event) => {
  event.preventDefault();
  if ($("generate").disabled || !form.isValid()) return;
  const request = JSON.stringify([form.request(), $("style").value]);
  if (sending.has(request)) return;
  sending.add(request);
  $("generate").setAttribute("aria-busy", true);
  await trying(generate, "submit");
  sending.delete(request);
  if (!sending.size) $("generate").removeAttribute("aria-busy");
};

/** Fills the form and the input images with the settings of a request. */
function useSettings(request) {
  // The style is part of the prompt already.
  $("style").value = "";
  rewrite.forget();
  form.fill(request);
  inputs.restore(request);
  seed.lock(true);
  $("prompt").focus();
}

/** Fills the form with the settings of an image. */
function reuseSettings(image) {
  const request = image.request;
  useSettings({
    ...request,
    prompt: image.prompt,
    negative_prompt: viewer.valueFor(image, request.negative_prompt),
    seed: image.seed ?? request.seed,
    // Only this image of the job.
    n: 1,
  });
}

/** What the server can do with an image besides: upscale it to a size within its limit. */
function moreActions(image) {
  const { upscale = [], upscaled_pixels: limit = 0 } = form.limits();
  const fits = (factor) => image.width * image.height * factor * factor <= limit;
  return upscale.filter(fits).map((factor) => [`Upscale ×${factor}`, () => upscaleImage(image, factor)]);
}

/** Enlarges an image: the model refines it tile by tile, with the image's own settings. */
async function upscaleImage(image, factor) {
  const { loras, guidance, negative_prompt, output_format, png } = image.request;
  const request = { prompt: image.prompt, model: image.model, loras, guidance, output_format, png, init: `image:${image.id}`, upscale: factor };
  if (negative_prompt) request.negative_prompt = viewer.valueFor(image, negative_prompt);
  jobs.watch(await submitJob("/v1/jobs", seed.toJson(request, image.seed ?? "0")));
  $("stage").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

notices.listen();
connection.listen();
session.listen(call);
form.listen();
loras.listen(prompts.insertWord, async () => {
  await form.reloadLoras();
  train.show();
});
prompts.listen();
rewrite.listen();
models.listen();
inputs.listen(gallery.find, useSettings);
viewer.listen({
  useAsReference: (image) => inputs.addGenerated(image),
  useAsInitial: (image) => inputs.addGenerated(image, true),
  reuseSettings,
  more: moreActions,
});
comparison.listen();
gallery.listen({ open: viewer.open, compare: comparison.compare });
stage.listen({ onImage: gallery.add, open: viewer.open, actionsFor: viewer.actionsFor });
queue.listen();
plot.listen(viewer.open);
train.listen();
/** Shows news of jobs in their order, when they don't move a button under a pressed pointer. */
const calmly = (show) => (...news) => whenReleased(() => show(...news));
jobs.listen({
  changed: calmly(() => {
    stage.showProgress();
    queue.show();
  }),
  preview: calmly(stage.showPreview),
  image: calmly(stage.addImage),
  ended: calmly(stage.showEnded),
});
keys.listen({
  submit: () => $("form").requestSubmit(),
  cancel: exclusive(stage.cancelCurrent),
  actions: {
    p: () => $("prompt").focus(),
    "/": () => $("search").focus(),
    d: seed.roll,
    l: () => seed.lock(),
    "?": () => $("help").click(),
  },
});

for (const close of document.querySelectorAll("[data-close]")) close.onclick = () => close.closest("dialog").close();
$("help").onclick = () => openDialog($("shortcuts"));

/** Fetches something that the page needs, until the server gives it. */
async function prepare(fetching) {
  for (let pause = 1000; ; pause = Math.min(2 * pause, 15_000)) {
    try {
      return await fetching();
    } catch (error) {
      fail(error.message, "start");
    }
    await sleep(pause);
    await connection.untilReachable();
  }
}

await prepare(form.prepare);
await Promise.all([gallery.load, jobs.refresh, inputs.prepare, train.prepare].map(prepare));
clearFailures("start");
document.body.dataset.ready = "true";
