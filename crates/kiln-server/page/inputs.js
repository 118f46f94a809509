// Input images: reference images in order, and an initial image with an optional mask.

import { upload } from "./api.js";
import { $, button, fail, make, trying } from "./dom.js";
import { drawMask, paintMask } from "./mask.js";

/** Reference images: `{ id, url, name }`. */
let references = [];
/** The initial image, and its mask as a canvas. */
let initial = null;
let mask = null;
/** Index of the reference image that is being dragged. */
let dragged = null;

/** The fields of a request for these images. */
export async function fields() {
  const request = {};
  if (references.length) request.references = references.map((r) => r.id);
  if (initial) {
    request.init = initial.id;
    request.strength = $("strength").valueAsNumber;
    if (mask) request.mask = (await upload(await toBlob(mask))).id;
  }
  return request;
}

/** The mask as a black and white PNG. */
function toBlob(mask) {
  const flat = make("canvas", { width: mask.width, height: mask.height });
  const context = flat.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, flat.width, flat.height);
  context.drawImage(mask, 0, 0);
  return new Promise((resolve) => flat.toBlob(resolve, "image/png"));
}

async function addFile(file) {
  if (!file.type.startsWith("image/")) return fail(`“${file.name}” is not an image.`);
  return trying(async () => add(await upload(file), URL.createObjectURL(file), file.name));
}

/** Adds an image of the gallery. */
export async function addGenerated(image, asInitial = false) {
  return trying(async () => {
    const blob = await (await fetch(image.url)).blob();
    add(await upload(blob), image.url, image.prompt);
    if (asInitial) makeInitial(references.length - 1);
  });
}

function add({ id }, url, name) {
  references.push({ id, url, name });
  show();
}

/** Restores the input images of a job's request. */
export function restore(request) {
  const input = (id) => ({ id, url: `/v1/inputs/${id.replace("input:", "")}`, name: "" });
  references = (request.references ?? []).map(input);
  initial = request.init ? input(request.init) : null;
  mask = null;
  if (request.mask) loadMask(input(request.mask).url);
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
    // The brush works on opaque white over transparency.
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

/** Makes a reference image the initial image. */
function makeInitial(index) {
  const [image] = references.splice(index, 1);
  if (initial) references.push(initial);
  [initial, mask] = [image, null];
  show();
}

function show() {
  $("references").replaceChildren(...references.map(row));
  $("initial-field").hidden = !initial;
  if (!initial) return;
  $("initial-image").src = initial.url;
  $("remove-mask").hidden = !mask;
  $("paint-mask").textContent = mask ? "Edit the mask" : "Paint a mask";
  const overlay = $("initial-mask");
  overlay.hidden = !mask;
  if (mask) drawMask(overlay, mask);
}

function row(reference, index) {
  const number = index + 1;
  const image = make("img", { src: reference.url, alt: `Reference ${number} ${reference.name}`, draggable: true });
  const tools = make("div", { className: "reference-tools" },
    make("span", { textContent: `${number}.`, className: "note" }),
    button("↑", () => move(index, index - 1), { "aria-label": `Move reference ${number} up`, disabled: index === 0 }),
    button("↓", () => move(index, index + 1), { "aria-label": `Move reference ${number} down`, disabled: number === references.length }),
    button("Use as initial image", () => makeInitial(index), { title: "Start from this image, optionally with a mask" }),
    button("✕", () => {
      references.splice(index, 1);
      show();
    }, { "aria-label": `Remove reference ${number}` }));
  const item = make("li", {}, image, tools);
  image.ondragstart = (event) => {
    dragged = index;
    event.dataTransfer.setData("text/plain", reference.id);
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
  // On the whole page, so that the browser does not open an image that misses the field.
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
  $("initial-to-reference").onclick = () => {
    references.unshift(initial);
    [initial, mask] = [null, null];
    show();
  };
  $("remove-mask").onclick = () => {
    mask = null;
    show();
  };
  $("paint-mask").onclick = async () => {
    const painted = await trying(() => paintMask(initial.url, mask));
    if (painted === undefined) return;
    mask = painted;
    show();
  };
}
