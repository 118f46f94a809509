// The pictures of a new training, with their captions.

import { upload } from "./api.js";
import { $, button, make, memory } from "./dom.js";
import { fail, trying } from "./notices.js";

/** `{ id, name, caption }` of uploaded pictures. */
let pictures = [];
/** Captions of text files whose pictures have not come yet, by name without extension. */
const texts = new Map();
let uploading = 0;
/** The most pictures of a training. */
const MOST = 1000;
let changed = () => {};

const stem = (name) => name.replace(/\.[^.]*$/, "").toLowerCase();

export const isUploading = () => uploading > 0;
export const values = () => pictures.map(({ id, name, caption }) => ({ image: id, name, caption }));
export const count = () => pictures.length;
/** The number of pictures without a caption. */
export const uncaptioned = () => pictures.filter(({ caption }) => !caption.trim()).length;

function save() {
  memory.set("train-pictures", pictures);
}

/** Adds pictures, and captions from text files of the same names. */
export async function add(files) {
  const all = [...files];
  for (const file of all.filter(({ name }) => /\.(txt|caption)$/i.test(name))) {
    const [name, text] = [stem(file.name), (await file.text()).trim()];
    const found = pictures.find((picture) => stem(picture.name) === name);
    if (found) found.caption ||= text;
    else texts.set(name, text);
  }
  const images = all.filter(({ type }) => type.startsWith("image/"));
  const others = all.filter(({ name, type }) => !type.startsWith("image/") && !/\.(txt|caption)$/i.test(name));
  if (others.length) fail(`Not used: ${others.slice(0, 5).map(({ name }) => `“${name}”`).join(", ")}${others.length > 5 ? ` and ${others.length - 5} more` : ""}. A training takes images and .txt files.`);
  if (pictures.length + uploading + images.length > MOST) return fail(`A training takes at most ${MOST} pictures.`);
  uploading += images.length;
  show();
  const failures = [];
  for (const file of images) {
    try {
      const { id } = await upload(file);
      pictures.push({ id, name: file.name, caption: texts.get(stem(file.name)) ?? "" });
    } catch (error) {
      failures.push(`“${file.name}”: ${error.message}`);
    }
    uploading -= 1;
    show();
  }
  if (failures.length) fail(`${failures.length === 1 ? "A picture" : `${failures.length} pictures`} can't be used. ${failures.slice(0, 3).join(" ")}`);
  save();
  changed();
}

function show() {
  $("train-pictures").replaceChildren(...pictures.map(card));
  $("train-count").textContent = uploading ? `Uploading, ${uploading} left…` : pictures.length ? `${pictures.length} ${pictures.length === 1 ? "picture" : "pictures"}` : "";
  $("train-clear").hidden = pictures.length === 0;
}

function card(picture, index) {
  const caption = make("textarea", { rows: 2, value: picture.caption, placeholder: "What it shows", "aria-label": `Caption of picture ${index + 1}, ${picture.name}` });
  caption.oninput = () => (picture.caption = caption.value);
  caption.onchange = () => {
    save();
    changed();
  };
  const image = make("img", { src: `/v1/inputs/${picture.id}`, alt: picture.name, title: picture.name });
  // The server keeps uploads for some hours.
  image.onerror = () => remove(picture);
  return make("li", {}, image, caption, button("✕", () => remove(picture), { className: "quiet icon", "aria-label": `Remove ${picture.name}` }));
}

function remove(picture) {
  pictures = pictures.filter((other) => other !== picture);
  save();
  show();
  changed();
}

export function clear() {
  pictures = [];
  texts.clear();
  save();
  show();
  changed();
}

/** `onChange` is called when pictures or captions have changed. */
export function listen(onChange) {
  changed = onChange;
  pictures = memory.get("train-pictures") ?? [];
  const drop = $("train-drop");
  $("train-browse").onclick = () => $("train-files").click();
  $("train-files").onchange = () => trying(async () => {
    await add($("train-files").files);
    $("train-files").value = "";
  });
  $("train-clear").onclick = clear;
  // Not for the form behind the dialog.
  const dialog = $("train");
  dialog.addEventListener("dragover", (event) => {
    event.preventDefault();
    event.stopPropagation();
    drop.classList.add("over");
  });
  dialog.addEventListener("dragleave", (event) => dialog.contains(event.relatedTarget) || drop.classList.remove("over"));
  dialog.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    drop.classList.remove("over");
    if (!$("train-form").hidden) trying(() => add(event.dataTransfer.files));
  });
  dialog.addEventListener("paste", (event) => {
    event.stopPropagation();
    if (event.clipboardData.files.length && !$("train-form").hidden) trying(() => add(event.clipboardData.files));
  });
  show();
}
