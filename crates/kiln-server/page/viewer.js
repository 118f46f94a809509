// The viewer: one image large with its settings, or two side by side.

import * as advanced from "./advanced.js";
import { $, button, make, trying } from "./dom.js";
import * as gallery from "./gallery.js";

let shown = null;
let actions = {};

/** The buttons for an image. */
export function actionsFor(image) {
  const close = (action) => () => {
    $("viewer").close();
    return trying(() => action(image));
  };
  return [
    make("a", { href: image.url, download: fileName(image), className: "button", textContent: "Download" }),
    button("Use as reference", close(actions.useAsReference)),
    button("Use as initial image", close(actions.useAsInitial)),
    button("Reuse settings", close(actions.reuseSettings)),
  ];
}

function fileName(image) {
  const words = image.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  const extension = { png: "png", jpeg: "jpg", webp: "webp" }[image.order.output_format];
  return `${words || "image"}-${image.seed ?? image.id}.${extension}`;
}

/** The value for this image, where the job may have a list with one value per prompt. */
export function valueFor(image, value) {
  if (!Array.isArray(value)) return value;
  return value[[image.order.prompt].flat().indexOf(image.prompt)] ?? value[0];
}

function facts(image) {
  const request = image.order;
  return [
    ["Prompt", image.prompt],
    ["Negative prompt", valueFor(image, request.negative_prompt)],
    ["Model", image.model],
    ["Size", `${image.width} × ${image.height}`],
    ["Steps", request.steps],
    ["Guidance", request.guidance],
    ["Seed", image.seed],
    ...advanced.facts(request),
    ["LoRAs", request.loras?.map((l) => `${l.name} (${l.weight})`).join(", ")],
    ["Reference images", request.references?.length],
    ["Strength", request.init && request.strength],
    ["Mask", request.mask && "yes"],
    ["Created", new Date(image.created).toLocaleString()],
    ["File", `${request.output_format.toUpperCase()}, ${Math.round(image.bytes / 1024)} KiB`],
  ].filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== 0);
}

export function open(image) {
  shown = image;
  $("viewer-image").src = image.url;
  $("viewer-image").alt = image.prompt;
  $("viewer-facts").replaceChildren(...facts(image).flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  const remove = button("Delete", () => trying(async () => {
    const next = neighbour(1) ?? neighbour(-1);
    await gallery.remove(image);
    if (next) open(next);
    else $("viewer").close();
  }), { className: "danger" });
  $("viewer-actions").replaceChildren(...actionsFor(image), remove);
  $("newer").disabled = !neighbour(-1);
  $("older").disabled = !neighbour(1);
  if (!$("viewer").open) $("viewer").showModal();
}

function neighbour(step) {
  const index = gallery.images.findIndex((image) => image.id === shown?.id);
  return index < 0 ? undefined : gallery.images[index + step];
}

function move(step) {
  const next = neighbour(step);
  if (next) open(next);
}

export function compare(newer, older) {
  let [left, right] = [older, newer];
  const show = () => {
    for (const [side, image] of [["left", left], ["right", right]]) {
      $(`${side}-image`).src = image.url;
      $(`${side}-image`).alt = image.prompt;
      const request = image.order;
      $(`${side}-facts`).textContent = [image.prompt, image.model, `${image.width} × ${image.height}`,
        request.steps && `${request.steps} steps`, request.guidance && `guidance ${request.guidance}`, `seed ${image.seed}`].filter(Boolean).join(" · ");
    }
  };
  $("swap").onclick = () => {
    [left, right] = [right, left];
    show();
  };
  show();
  $("comparison").showModal();
}

export function listen(options) {
  actions = options;
  $("newer").onclick = () => move(-1);
  $("older").onclick = () => move(1);
  // On the document: a button that becomes disabled loses the focus, and the dialog with it.
  document.addEventListener("keydown", (event) => {
    if (!$("viewer").open) return;
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
}
