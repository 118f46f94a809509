// One picture large, with how it was made; two side by side.

import * as advanced from "./advanced.js";
import { $, button, make, trying } from "./dom.js";
import * as gallery from "./gallery.js";

let shown = null;
let actions = {};

/** What can be done with a picture. */
export function actionsFor(picture) {
  const close = (work) => () => {
    $("viewer").close();
    return trying(() => work(picture));
  };
  return [
    make("a", { href: picture.url, download: name(picture), className: "button", textContent: "Download" }),
    button("Use as reference", close(actions.reference)),
    button("Start from it", close(actions.canvas)),
    button("Same recipe again", close(actions.again)),
  ];
}

function name(picture) {
  const words = picture.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  const ending = { png: "png", jpeg: "jpg", webp: "webp" }[picture.order.output_format];
  return `${words || "picture"}-${picture.seed ?? picture.id}.${ending}`;
}

/** A value that belongs to an image where the job has a list with one for each prompt. */
export function own(picture, value) {
  if (!Array.isArray(value)) return value;
  return value[[picture.order.prompt].flat().indexOf(picture.prompt)] ?? value[0];
}

function facts(picture) {
  const { order } = picture;
  return [
    ["Prompt", picture.prompt],
    ["Negative prompt", own(picture, order.negative_prompt)],
    ["Model", picture.model],
    ["Size", `${picture.width} × ${picture.height}`],
    ["Steps", order.steps],
    ["Guidance", order.guidance],
    ["Seed", picture.seed],
    ...advanced.facts(order),
    ["LoRAs", order.loras?.map((l) => `${l.name} (${l.weight})`).join(", ")],
    ["References", order.references?.length],
    ["Change", order.init && order.strength],
    ["Mask", order.mask && "yes"],
    ["Made", new Date(picture.created).toLocaleString()],
    ["File", `${order.output_format.toUpperCase()}, ${Math.round(picture.bytes / 1024)} KiB`],
  ].filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== 0);
}

export function open(picture) {
  shown = picture;
  $("viewer-image").src = picture.url;
  $("viewer-image").alt = picture.prompt;
  $("viewer-facts").replaceChildren(...facts(picture).flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  const remove = button("Delete", () => trying(async () => {
    const next = neighbour(1) ?? neighbour(-1);
    await gallery.remove(picture);
    if (next) open(next);
    else $("viewer").close();
  }), { className: "danger" });
  $("viewer-actions").replaceChildren(...actionsFor(picture), remove);
  $("newer").disabled = !neighbour(-1);
  $("older").disabled = !neighbour(1);
  if (!$("viewer").open) $("viewer").showModal();
}

function neighbour(step) {
  const at = gallery.pictures.findIndex((p) => p.id === shown?.id);
  return at < 0 ? undefined : gallery.pictures[at + step];
}

function turn(step) {
  const next = neighbour(step);
  if (next) open(next);
}

export function compare(newer, older) {
  // The older one is the one that was before.
  let [left, right] = [older, newer];
  const show = () => {
    for (const [side, picture] of [["left", left], ["right", right]]) {
      $(`${side}-image`).src = picture.url;
      $(`${side}-image`).alt = picture.prompt;
      const { order } = picture;
      $(`${side}-facts`).textContent = [picture.prompt, picture.model, `${picture.width} × ${picture.height}`,
        order.steps && `${order.steps} steps`, order.guidance && `guidance ${order.guidance}`, `seed ${picture.seed}`].filter(Boolean).join(" · ");
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
  $("newer").onclick = () => turn(-1);
  $("older").onclick = () => turn(1);
  // On the document: a button that can go no further loses the focus, and the dialog with it.
  document.addEventListener("keydown", (event) => {
    if (!$("viewer").open) return;
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
}
