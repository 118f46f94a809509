// The viewer: one image large, with zoom, its settings and what can be done with it.

import * as advanced from "./advanced.js";
import { call } from "./api.js";
import { $, button, make, openDialog } from "./dom.js";
import * as gallery from "./gallery.js";
import { trying } from "./notices.js";
import { showImage } from "./image.js";
import { percent, zoomable } from "./zoom.js";

let shown = null;
let zoom = null;
let actions = {};

/** The buttons for an image. */
export function actionsFor(image) {
  const close = (action) => () => {
    $("viewer").close();
    return trying(() => action(image));
  };
  const extra = (actions.more?.(image) ?? []).map(([name, action]) => button(name, close(action)));
  return [
    make("a", { href: image.url, download: fileName(image), className: "button", textContent: "Download" }),
    button("Use as reference", close(actions.useAsReference)),
    button("Use as initial image", close(actions.useAsInitial)),
    button("Reuse settings", close(actions.reuseSettings)),
    ...extra,
  ];
}

export function fileName(image) {
  const words = image.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  const extension = { png: "png", jpeg: "jpg", webp: "webp" }[image.request.output_format];
  return `${words || "image"}-${image.seed ?? image.id}.${extension}`;
}

/** The value for this image, where the job may have a list with one value per prompt. */
export function valueFor(image, value) {
  if (!Array.isArray(value)) return value;
  return value[[image.request.prompt].flat().indexOf(image.prompt)] ?? value[0];
}

function facts(image) {
  const request = image.request;
  return [
    ["Prompt", image.prompt],
    ["Negative prompt", valueFor(image, request.negative_prompt)],
    ["Model", image.model],
    ["Size", `${image.width} × ${image.height}`],
    ["Upscaled", request.upscale && `×${request.upscale}`],
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

export function open(opened) {
  // The gallery knows the image's marks.
  const image = gallery.find(opened.id) ?? opened;
  shown = image;
  showImage($("viewer-image"), image.url);
  $("viewer-image").alt = image.prompt;
  $("viewer-facts").replaceChildren(...facts(image).flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  showOrigin(image);
  const star = button(image.favourite ? "★ Favourite" : "☆ Favourite", () => trying(async () => {
    await gallery.star([image], !image.favourite);
    open(image);
    $("viewer-star").focus();
  }), { id: "viewer-star", "aria-pressed": image.favourite === true });
  const remove = button(gallery.inTrash() ? "Delete for good" : "Delete", (event) => trying(async () => {
    // The second click of a double click is not for the next image.
    if (event.detail > 1) return;
    const next = neighbour(1) ?? neighbour(-1);
    await gallery.remove([image]);
    if (next) open(next);
    else $("viewer").close();
  }), { className: "danger" });
  // Images of a job that is not in the loaded part of the gallery have no neighbours, and no marks.
  const inGallery = gallery.find(image.id);
  $("viewer-actions").replaceChildren(...actionsFor(image), ...(inGallery ? [star, remove] : []));
  $("newer").disabled = !neighbour(-1);
  $("older").disabled = !neighbour(1);
  openDialog($("viewer"));
}

/** Adds what the file says of its origin: AI mark and credentials. */
async function showOrigin(image) {
  const value = make("dd", { id: "viewer-origin", textContent: "…" });
  $("viewer-facts").append(make("dt", { textContent: "Origin" }), value);
  try {
    value.textContent = (await call(`/v1/images/${encodeURIComponent(image.id)}/origin`)).summary;
  } catch (error) {
    value.textContent = error.message;
  }
}

function neighbour(step) {
  const index = gallery.images.findIndex((image) => image.id === shown?.id);
  return index < 0 ? undefined : gallery.images[index + step];
}

function move(step) {
  const next = neighbour(step);
  if (next) open(next);
}

export function listen(options) {
  actions = options;
  zoom = zoomable($("viewer-stage"), $("viewer-image"), percent($("zoom-level")));
  $("zoom-in").onclick = () => zoom.zoom(1.5);
  $("zoom-out").onclick = () => zoom.zoom(1 / 1.5);
  $("zoom-level").onclick = () => zoom.toggle();
  $("newer").onclick = () => move(-1);
  $("older").onclick = () => move(1);
  // On the document: a button that becomes disabled loses the focus, and the dialog with it.
  document.addEventListener("keydown", (event) => {
    if (!$("viewer").open || event.ctrlKey || event.metaKey) return;
    if (zoom.key(event.key)) return event.preventDefault();
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
    // A key that is held down is one press.
    if (event.repeat) return;
    if (event.key === "Delete") $("viewer-actions").querySelector(".danger")?.click();
    if (event.key === "f") $("viewer-star")?.click();
  });
}
