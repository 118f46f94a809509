// Input images: reference images in order, and an initial image with an optional mask. They survive a reload.

import { call, upload } from "./api.js";
import { $, button, make, memory } from "./dom.js";
import { drawMask, feathered, loadMask, paintMask, toBlob } from "./mask.js";
import { fail, note, trying } from "./notices.js";
import * as size from "./size.js";

/** Reference images: `{ id, name, width, height }`. */
let references = [];
/** The initial image, and its mask: `{ canvas, id, feather }`. */
let initial = null;
let mask = null;
/** Index of the reference image that is being dragged. */
let dragged = null;
let useSettings = () => {};

/** The type of images dragged from the gallery. */
export const DRAGGED_IMAGE = "application/x-kiln-image";
let generated = () => undefined;

const url = ({ id }) => `/v1/inputs/${id.replace("input:", "")}`;

/** The fields of a request for these images. */
export async function fields() {
  const request = {};
  if (references.length) request.references = references.map((r) => r.id);
  if (initial) {
    request.init = initial.id;
    request.strength = $("strength").valueAsNumber;
    if (mask) {
      request.mask = mask.feather ? (await upload(await toBlob(feathered(mask.canvas, mask.feather)))).id : mask.id;
      // The image keeps its size.
      request.width = request.height = undefined;
    }
  }
  return request;
}

async function addFile(file) {
  const named = (reason) => fail(`“${file.name}” can't be used: ${reason}`);
  if (!file.type.startsWith("image/")) return named("it is not an image.");
  let input;
  try {
    input = await upload(file);
  } catch (error) {
    return named(error.message);
  }
  add({ ...input, name: file.name });
  if (input.recipe_error) fail(`The settings in “${file.name}” can't be used: ${input.recipe_error}.`);
  if (input.recipe) note(`“${file.name}” holds the settings it was generated with.`, "Use them", () => useRecipe(input.id));
}

/** Fills the form with the settings inside an image. */
async function useRecipe(id) {
  const { order, seed, missing } = await call(`/v1/inputs/${id}/recipe`);
  useSettings({ ...order, seed });
  note(missing.length ? `Settings restored, without ${missing.join(", ")}: not on this server.` : "Settings restored.");
}

/** Adds an image of the gallery. */
export async function addGenerated(image, asInitial = false) {
  return trying(async () => {
    const blob = await (await fetch(image.url)).blob();
    add({ ...(await upload(blob)), name: image.prompt });
    if (asInitial) makeInitial(references.length - 1);
  });
}

function add({ id, name, width, height }) {
  references.push({ id, name, width, height });
  show();
}

/** Restores the input images of a job's request. */
export function restore(request) {
  const input = (id) => ({ id, name: "" });
  references = (request.references ?? []).map(input);
  initial = request.init ? input(request.init) : null;
  setMask(null);
  if (request.mask) restoreMask(request.mask, 0);
  show();
}

async function restoreMask(id, feather) {
  await trying(async () => {
    mask = { id, feather, canvas: await loadMask(url({ id })) };
    $("feather").value = feather;
    show();
  });
}

function setMask(value) {
  mask = value;
  $("feather").value = value?.feather ?? 0;
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
  initial = image;
  setMask(null);
  show();
}

/** Removes an image that the server no longer has. */
function drop(id) {
  references = references.filter((reference) => reference.id !== id);
  if (initial?.id === id) {
    initial = null;
    setMask(null);
  }
  show();
}

function show() {
  memory.set("inputs", { references, initial, mask: mask && { id: mask.id, feather: mask.feather } });
  $("references").replaceChildren(...references.map(row));
  size.useSource(initial ?? references[0]);
  $("initial-field").hidden = !initial;
  if (!initial) return;
  $("initial-image").onerror = () => drop(initial?.id);
  $("initial-image").onload = () => learnSize(initial, $("initial-image"));
  $("initial-image").src = url(initial);
  $("remove-mask").hidden = $("feather-field").hidden = !mask;
  $("feather-number").textContent = `${$("feather").value} px`;
  $("paint-mask").textContent = mask ? "Edit the mask" : "Paint a mask";
  $("initial-mask").hidden = !mask;
  if (mask) drawMask($("initial-mask"), feathered(mask.canvas, mask.feather));
}

/** Restored images come without their size. */
function learnSize(input, image) {
  if (!input || input.width) return;
  [input.width, input.height] = [image.naturalWidth, image.naturalHeight];
  size.useSource(initial ?? references[0]);
}

function row(reference, index) {
  const number = index + 1;
  const image = make("img", { src: url(reference), alt: `Reference ${number} ${reference.name}`, draggable: true });
  image.onerror = () => drop(reference.id);
  image.onload = () => learnSize(reference, image);
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

/** Takes images that are dropped anywhere on the page: the browser would open one that misses the field. */
function listenForDrops() {
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", dragged === null);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? $("drop").classList.remove("over"));
  document.addEventListener("dragend", () => $("drop").classList.remove("over"));
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    const image = generated(event.dataTransfer.getData(DRAGGED_IMAGE));
    // Not back onto the gallery.
    if (image) return void (event.target.closest?.("#gallery") || addGenerated(image));
    for (const file of event.dataTransfer.files) await addFile(file);
  });
  document.addEventListener("paste", async (event) => {
    for (const file of event.clipboardData.files) await addFile(file);
  });
}

/** Restores the images of the last visit. */
export async function prepare() {
  const saved = memory.get("inputs");
  if (!saved) return;
  [references, initial] = [saved.references ?? [], saved.initial ?? null];
  if (saved.mask) await restoreMask(saved.mask.id, saved.mask.feather);
  show();
}

/** `find` returns an image of the gallery by its id, `use` fills in the settings of a request. */
export function listen(find, use) {
  [generated, useSettings] = [find, use];
  $("browse").onclick = () => $("files").click();
  $("files").onchange = async () => {
    for (const file of $("files").files) await addFile(file);
    $("files").value = "";
  };
  listenForDrops();
  $("initial-to-reference").onclick = () => {
    references.unshift(initial);
    initial = null;
    setMask(null);
    show();
  };
  $("remove-mask").onclick = () => {
    setMask(null);
    show();
  };
  $("feather").oninput = () => {
    mask.feather = $("feather").valueAsNumber;
    show();
  };
  $("paint-mask").onclick = () => trying(async () => {
    const painted = await paintMask(url(initial), mask?.canvas);
    if (painted === undefined) return;
    const feather = mask?.feather ?? 0;
    // Uploaded now, so that it survives a reload.
    setMask(painted && { canvas: painted, feather, id: (await upload(await toBlob(painted))).id });
    show();
  });
}
