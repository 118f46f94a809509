// Input images: reference images in order, and an initial image with an optional mask. They survive a reload, and errors of
// the server and the network.

import { call } from "./api.js";
import { $, button, make, memory, setText, sleep, whenReleased } from "./dom.js";
import { drawMask, feathered, loadMask, paintMask, toBlob } from "./mask.js";
import { exclusive, fail, note, trying } from "./notices.js";
import { showImage } from "./image.js";
import * as size from "./size.js";
import { upload } from "./upload.js";

/** Pause before a mask is fetched again, in milliseconds. */
const PAUSE = 5000;
/** Reference images: `{ id, name, width, height, missing }`; `missing`: the server no longer has it. */
let references = [];
/** The initial image, and its mask: `{ id, feather, canvas, loading }`; the canvas comes later if the server has to send it. */
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
  const gone = [...references, initial].filter((input) => input?.missing);
  if (gone.length === 1) throw new Error("An input image is no longer on the server: add the file again, or remove it.");
  if (gone.length) throw new Error(`${gone.length} input images are no longer on the server: add the files again, or remove them.`);
  const request = {};
  if (references.length) request.references = references.map((r) => r.id);
  if (initial) {
    request.init = initial.id;
    request.strength = $("strength").valueAsNumber;
    await mask?.loading;
    if (mask) {
      request.mask = mask.feather ? (await upload(await toBlob(feathered(mask.canvas, mask.feather)))).id : mask.id ?? (await saveMask());
      // The image keeps its size.
      request.width = request.height = undefined;
    }
  }
  return request;
}

/** Uploads an image, and tells how far it is. */
async function uploadNamed(blob, name) {
  const tell = (part) => setText($("inputs-status"), `Uploading “${name}”${part > 0 ? `, ${Math.floor(100 * part)} %` : ""}…`);
  tell(0);
  try {
    return await upload(blob, tell);
  } finally {
    setText($("inputs-status"), "");
  }
}

/** Uploads the mask, so that it survives a reload; until then only this page has it. */
async function saveMask() {
  const painted = mask;
  painted.id = (await upload(await toBlob(painted.canvas))).id;
  show();
  return painted.id;
}

async function addFile(file) {
  const named = (reason) => fail(`“${file.name}” can't be used: ${reason}`);
  if (!file.type.startsWith("image/")) return named("it is not an image.");
  let input;
  try {
    input = await uploadNamed(file, file.name);
  } catch (error) {
    return named(error.message);
  }
  whenReleased(() => add({ ...input, name: file.name }));
  if (input.recipe_error) fail(`The settings in “${file.name}” can't be used: ${input.recipe_error}.`);
  if (input.recipe) note(`“${file.name}” holds the settings it was generated with.`, "Use them", () => useRecipe(input.id));
}

/** Fills the form with the settings inside an image. */
async function useRecipe(id) {
  const { request, seed, missing } = await call(`/v1/inputs/${id}/recipe`);
  useSettings({ ...request, seed });
  note(missing.length ? `Settings restored, without ${missing.join(", ")}: not on this server.` : "Settings restored.");
}

/** Adds an image of the gallery. */
export async function addGenerated(image, asInitial = false) {
  return trying(async () => {
    const blob = await call(image.url, { read: "blob" });
    add({ ...(await uploadNamed(blob, image.prompt)), name: image.prompt });
    if (asInitial) makeInitial(references.length - 1);
  });
}

function add({ id, name, width, height }) {
  const gone = [...references, initial].filter((input) => input?.missing && (input.id === id || input.name === name));
  // The same file again: back to its place.
  if (gone.length) for (const input of gone) Object.assign(input, { id, width, height, missing: false });
  else references.push({ id, name, width, height });
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

/** Takes over a mask that the server has. */
function restoreMask(id, feather) {
  const restored = { id, feather, canvas: null };
  setMask(restored);
  restored.loading = (async () => {
    while (mask === restored && !restored.canvas) {
      try {
        restored.canvas = await loadMask(url({ id }));
      } catch (error) {
        // Any other error may pass.
        if (error.status !== 404) await sleep(PAUSE);
        else if (mask === restored) {
          fail("The mask is no longer on the server. Paint it again.");
          setMask(null);
        }
      }
    }
    show();
  })();
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

/** What is saved of an image: whether the server has it is found out again. */
const saved = (input) => input && { id: input.id, name: input.name, width: input.width, height: input.height };

function show() {
  memory.set("inputs", { references: references.map(saved), initial: saved(initial), mask: mask?.id ? { id: mask.id, feather: mask.feather } : null });
  $("references").replaceChildren(...references.map(row));
  size.useSource(initial ?? references[0]);
  $("initial-field").hidden = !initial;
  if (!initial) return;
  const input = initial;
  $("initial-gone").hidden = !input.missing;
  $("initial-image").hidden = input.missing === true;
  $("paint-mask").disabled = input.missing === true;
  $("initial-image").onload = () => learnSize(input, $("initial-image"));
  if (!input.missing) showImage($("initial-image"), url(input), () => isGone(input));
  originLine(input, $("initial-origin"));
  $("remove-mask").hidden = $("feather-field").hidden = !mask;
  $("feather-number").textContent = `${$("feather").value} px`;
  $("paint-mask").textContent = mask ? "Edit the mask" : "Paint a mask";
  $("initial-mask").hidden = !mask?.canvas;
  if (mask?.canvas) drawMask($("initial-mask"), feathered(mask.canvas, mask.feather));
}

/** A line about where an image comes from: AI mark and credentials. It is asked for once. */
function originLine(input, line = make("p", { className: "note origin" })) {
  line.textContent = input.origin ?? "";
  // The list may be made anew before the answer is there.
  input.line = line;
  if (input.missing || input.origin !== undefined) return line;
  input.origin = "";
  call(`${url(input)}/origin`).then(
    ({ summary }) => input.line.textContent = input.origin = summary,
    // It can wait for the next look at the image.
    () => input.origin = undefined);
  return line;
}

/** Marks an image that the server no longer has: it keeps uploads for some hours, and only for who uploaded them. */
function isGone(input) {
  input.missing = true;
  whenReleased(show);
}

/** Restored images come without their size. */
function learnSize(input, image) {
  if (!input || input.width) return;
  [input.width, input.height] = [image.naturalWidth, image.naturalHeight];
  size.useSource(initial ?? references[0]);
}

function row(reference, index) {
  const number = index + 1;
  const image = make("img", { alt: `Reference ${number} ${reference.name}`, draggable: true, hidden: reference.missing === true });
  image.onload = () => learnSize(reference, image);
  if (!reference.missing) showImage(image, url(reference), () => isGone(reference));
  const tools = make("div", { className: "reference-tools" },
    make("span", { textContent: `${number}.`, className: "note" }),
    button("↑", () => move(index, index - 1), { "aria-label": `Move reference ${number} up`, disabled: index === 0 }),
    button("↓", () => move(index, index + 1), { "aria-label": `Move reference ${number} down`, disabled: number === references.length }),
    button("Use as initial image", () => makeInitial(index), { title: "Start from this image, optionally with a mask" }),
    button("✕", () => {
      references.splice(index, 1);
      show();
    }, { "aria-label": `Remove reference ${number}` }));
  tools.append(originLine(reference));
  if (reference.missing) tools.append(make("p", { className: "gone", textContent: `“${reference.name || "This image"}” is no longer on the server. Add the file again.` }));
  const item = make("li", { className: reference.missing ? "missing" : "" }, image, tools);
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
  const last = memory.get("inputs");
  if (!last) return;
  [references, initial] = [last.references ?? [], last.initial ?? null];
  if (last.mask) restoreMask(last.mask.id, last.mask.feather);
  show();
}

/** `find` returns an image of the gallery by its id, `use` fills in the settings of a request. */
export function listen(find, use) {
  [generated, useSettings] = [find, use];
  $("browse").onclick = () => $("files").click();
  $("files").onchange = async () => {
    const files = [...$("files").files];
    // The same file may be chosen again.
    $("files").value = "";
    for (const file of files) await addFile(file);
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
  $("paint-mask").onclick = exclusive(async () => {
    await mask?.loading;
    const painted = await paintMask(url(initial), mask?.canvas);
    if (painted === undefined) return;
    setMask(painted && { canvas: painted, feather: mask?.feather ?? 0, id: null });
    show();
    if (painted) await saveMask();
  });
}
