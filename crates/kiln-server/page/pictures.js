// Pictures to work from: references in order, and one to start from, perhaps with a mask.

import { send } from "./api.js";
import { $, button, fail, make, trying } from "./dom.js";
import { drawMask, paintMask } from "./mask.js";

/** References: `{ id, url, name }`. */
let references = [];
/** The picture to start from, and its mask as a canvas. */
let canvas = null;
let mask = null;
let dragged = null;

/** What goes into the order. */
export async function sources() {
  const asked = {};
  if (references.length) asked.references = references.map((r) => r.id);
  if (canvas) {
    asked.init = canvas.id;
    asked.strength = $("strength").valueAsNumber;
    if (mask) asked.mask = (await send(await toBlob(mask))).id;
  }
  return asked;
}

/** Black and white, as the server takes it. */
function toBlob(mask) {
  const flat = make("canvas", { width: mask.width, height: mask.height });
  const context = flat.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, flat.width, flat.height);
  context.drawImage(mask, 0, 0);
  return new Promise((resolve) => flat.toBlob(resolve, "image/png"));
}

export async function addFile(file) {
  if (!file.type.startsWith("image/")) return fail(`“${file.name}” is not a picture.`);
  return trying(async () => add(await send(file), URL.createObjectURL(file), file.name));
}

/** A picture of the gallery. */
export async function addMade(picture, asCanvas = false) {
  return trying(async () => {
    const blob = await (await fetch(picture.url)).blob();
    add(await send(blob), picture.url, picture.prompt);
    if (asCanvas) startFrom(references.length - 1);
  });
}

function add({ id }, url, name) {
  references.push({ id, url, name });
  show();
}

/** Puts the pictures of an order in again. */
export function restore(order) {
  const picture = (id) => ({ id, url: `/v1/inputs/${id.replace("input:", "")}`, name: "" });
  references = (order.references ?? []).map(picture);
  canvas = order.init ? picture(order.init) : null;
  mask = null;
  if (order.mask) loadMask(picture(order.mask).url);
  show();
}

async function loadMask(url) {
  await trying(async () => {
    const image = new Image();
    image.src = url;
    await image.decode();
    mask = make("canvas", { width: image.naturalWidth, height: image.naturalHeight });
    const context = mask.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, mask.width, mask.height);
    // White becomes opaque white, black see-through: the form that is painted in.
    for (let i = 0; i < pixels.data.length; i += 4) pixels.data.set([255, 255, 255, pixels.data[i]], i);
    context.putImageData(pixels, 0, 0);
    show();
  });
}

function move(from, to) {
  if (to < 0 || to >= references.length) return;
  references.splice(to, 0, ...references.splice(from, 1));
  show();
}

function startFrom(index) {
  const [picture] = references.splice(index, 1);
  if (canvas) references.push(canvas);
  [canvas, mask] = [picture, null];
  show();
}

function show() {
  $("references").replaceChildren(...references.map(row));
  $("canvas-field").hidden = !canvas;
  if (!canvas) return;
  $("canvas-image").src = canvas.url;
  $("drop-mask").hidden = !mask;
  $("paint-mask").textContent = mask ? "Change the mask" : "Paint a mask";
  const overlay = $("canvas-mask");
  overlay.hidden = !mask;
  if (mask) drawMask(overlay, mask);
}

function row(picture, index) {
  const number = index + 1;
  const image = make("img", { src: picture.url, alt: `Reference ${number} ${picture.name}`, draggable: true });
  const tools = make("div", { className: "reference-tools" },
    make("span", { textContent: `${number}.`, className: "note" }),
    button("↑", () => move(index, index - 1), { "aria-label": `Move reference ${number} up`, disabled: index === 0 }),
    button("↓", () => move(index, index + 1), { "aria-label": `Move reference ${number} down`, disabled: number === references.length }),
    button("Start from it", () => startFrom(index), { title: "Begin with this picture, and paint a mask on it" }),
    button("✕", () => {
      references.splice(index, 1);
      show();
    }, { "aria-label": `Remove reference ${number}` }));
  const item = make("li", {}, image, tools);
  image.ondragstart = (event) => {
    dragged = index;
    event.dataTransfer.setData("text/plain", picture.id);
    item.classList.add("moving");
  };
  image.ondragend = () => {
    dragged = null;
    item.classList.remove("moving");
  };
  item.ondragover = (event) => dragged !== null && event.preventDefault();
  item.ondrop = (event) => {
    if (dragged === null) return;
    event.preventDefault();
    event.stopPropagation();
    move(dragged, index);
  };
  return item;
}

export function listen() {
  $("browse").onclick = () => $("files").click();
  $("files").onchange = async () => {
    for (const file of $("files").files) await addFile(file);
    $("files").value = "";
  };
  // Anywhere on the page, so that a picture that misses the field does not open instead.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", dragged === null);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? $("drop").classList.remove("over"));
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    for (const file of event.dataTransfer.files) await addFile(file);
  });
  document.addEventListener("paste", async (event) => {
    for (const file of event.clipboardData.files) await addFile(file);
  });
  $("canvas-off").onclick = () => {
    references.unshift(canvas);
    [canvas, mask] = [null, null];
    show();
  };
  $("drop-mask").onclick = () => {
    mask = null;
    show();
  };
  $("paint-mask").onclick = async () => {
    const painted = await trying(() => paintMask(canvas.url, mask));
    if (painted === undefined) return;
    mask = painted;
    show();
  };
}
