// The page: puts its parts together.

import { call } from "./api.js";
import { $, clearFailure, memory, trying } from "./dom.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as pictures from "./pictures.js";
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

async function paint() {
  clearFailure();
  const order = form.order();
  Object.assign(order.asked, await pictures.sources());
  const body = form.toJson(order);
  const view = await call("/v1/jobs", { method: "POST", headers: { "content-type": "application/json" }, body });
  stage.watch(view);
  // On a phone the picture is below the form.
  if (matchMedia("(max-width: 900px)").matches) $("figure").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

/** One click is one order, however long the pictures take to arrive. */
let sending = false;
$("form").onsubmit = async (event) => {
  event.preventDefault();
  if (sending || !$("form").reportValidity()) return;
  sending = true;
  await trying(paint);
  sending = false;
};

async function again(picture) {
  const { order } = picture;
  // Of a job with several prompts it is this image's; its noise is the same if each image had a seed of its own.
  const one = Array.isArray(order.prompt) || Array.isArray(order.seed);
  form.fill({
    ...order,
    prompt: picture.prompt,
    negative_prompt: viewer.own(picture, order.negative_prompt),
    seed: picture.seed ?? order.seed,
    n: one ? 1 : order.n,
  });
  pictures.restore(order);
  form.lockSeed(true);
  $("prompt").focus();
}

form.listen();
pictures.listen();
viewer.listen({
  reference: (picture) => pictures.addMade(picture),
  canvas: (picture) => pictures.addMade(picture, true),
  again,
});
gallery.listen({ open: viewer.open, compare: viewer.compare });
stage.listen({ onPicture: gallery.add, actionsFor: viewer.actionsFor });

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
