// The images of a new training, with their captions. They stay in this browser until a training has them or the user
// removes them: no error of the server or the network does.

import { $, button, make, memory, setText, whenReleased } from "./dom.js";
import { fail, note, trying } from "./notices.js";
import { showImage } from "./image.js";
import { upload } from "./upload.js";

/** `{ id, name, caption, missing }` of uploaded images; `missing`: the server no longer has it. */
let images = [];
/** Their cards, by image: created once, so that a caption that is being typed stays. */
const cards = new Map();
/** Captions of text files whose images have not come yet, by name without extension. */
const texts = new Map();
let uploading = 0;
/** The part of the current upload that is sent. */
let sent = 0;
/** The most images of a training. */
const MOST = 1000;
let changed = () => {};

const stem = (name) => name.replace(/\.[^.]*$/, "").toLowerCase();
const plural = (n) => (n === 1 ? "image" : "images");

export const isUploading = () => uploading > 0;
export const values = () => images.map(({ id, name, caption }) => ({ image: id, name, caption }));
export const count = () => images.length;
/** The number of images without a caption. */
export const uncaptioned = () => images.filter(({ caption }) => !caption.trim()).length;
/** The names of images that the server no longer has. */
export const missing = () => images.filter((image) => image.missing).map(({ name }) => name);

function save() {
  memory.set("train-images", images.map(({ id, name, caption }) => ({ id, name, caption })));
}

/** Takes an uploaded image: a new one, or one that the server no longer had. */
function take(id, name) {
  const known = images.find((image) => image.missing && (image.id === id || image.name === name));
  if (known) Object.assign(known, { id, missing: false });
  else images.push({ id, name, caption: texts.get(stem(name)) ?? "" });
  if (known) showCard(known);
}

/** Adds captions from text files to the images of the same names. */
async function addCaptions(files) {
  for (const file of files) {
    const [name, text] = [stem(file.name), (await file.text()).trim()];
    const found = images.find((image) => stem(image.name) === name);
    if (!found) texts.set(name, text);
    else if (!found.caption) setCaption(found, text);
  }
}

/** Adds images, and captions from text files of the same names. */
export async function add(files) {
  const all = [...files];
  const isText = ({ name }) => /\.(txt|caption)$/i.test(name);
  await addCaptions(all.filter(isText));
  const added = all.filter(({ type }) => type.startsWith("image/"));
  const others = all.filter((file) => !file.type.startsWith("image/") && !isText(file));
  if (others.length) fail(`Not used: ${others.slice(0, 5).map(({ name }) => `“${name}”`).join(", ")}${others.length > 5 ? ` and ${others.length - 5} more` : ""}. A training takes images and .txt files.`);
  if (images.length + uploading + added.length > MOST) return fail(`A training takes at most ${MOST} images.`);
  uploading += added.length;
  show();
  const failures = [];
  for (const file of added) {
    try {
      const { id } = await upload(file, (part) => {
        sent = part;
        showCount();
      });
      take(id, file.name);
    } catch (error) {
      failures.push(`“${file.name}”: ${error.message}`);
    }
    [uploading, sent] = [uploading - 1, 0];
    save();
    whenReleased(show);
  }
  if (failures.length) fail(`${failures.length === 1 ? "An image" : `${failures.length} images`} can't be used. ${failures.slice(0, 3).join(" ")}`);
  save();
  changed();
}

function showCount() {
  const part = sent > 0 && sent < 1 ? `, ${Math.floor(100 * sent)} % of the next` : "";
  setText($("train-count"), uploading ? `Uploading, ${uploading} left${part}…` : images.length ? `${images.length} ${plural(images.length)}` : "");
}

function show() {
  const items = images.map((image) => {
    if (!cards.has(image)) cards.set(image, card(image));
    return cards.get(image);
  });
  for (const [image, item] of cards) if (!images.includes(image)) item.remove();
  // Only what is new moves: the field with the focus stays where it is.
  for (const [index, item] of items.entries()) {
    const place = $("train-images").children[index];
    if (place !== item) $("train-images").insertBefore(item, place ?? null);
    item.querySelector("textarea").setAttribute("aria-label", `Caption of image ${index + 1}, ${images[index].name}`);
  }
  showCount();
  $("train-clear").hidden = images.length === 0;
}

function card(image) {
  const caption = make("textarea", { rows: 2, value: image.caption, placeholder: "What it shows" });
  caption.oninput = () => {
    image.caption = caption.value;
    save();
  };
  caption.onchange = () => changed();
  const element = make("img", { alt: image.name, title: image.name });
  const gone = make("p", { className: "gone", hidden: true, textContent: "No longer on the server. Add this file again; its caption is kept." });
  const item = make("li", {}, element, gone, make("p", { className: "note file-name", textContent: image.name }), caption,
    button("✕", () => remove(image), { className: "quiet icon", "aria-label": `Remove ${image.name}` }));
  cards.set(image, item);
  showCard(image);
  return item;
}

/** Shows the image itself. The server keeps uploads for some hours, and only for who uploaded them. */
function showCard(image) {
  const item = cards.get(image);
  const showGone = () => {
    item.querySelector(".gone").hidden = !image.missing;
    item.querySelector("img").hidden = image.missing === true;
  };
  showGone();
  showImage(item.querySelector("img"), `/v1/inputs/${image.id}`, () => {
    image.missing = true;
    whenReleased(showGone);
  });
}

function setCaption(image, text) {
  image.caption = text;
  const field = cards.get(image)?.querySelector("textarea");
  if (field) field.value = text;
}

/** Replaces the images, and tells that. */
function replace(list) {
  images = list;
  save();
  show();
  changed();
}

/** Removes images with their captions, which can be undone. */
function remove(...gone) {
  const before = images;
  const focused = cards.get(gone[0])?.contains(document.activeElement);
  const next = images[images.indexOf(gone[0]) + 1];
  replace(images.filter((image) => !gone.includes(image)));
  if (focused) cards.get(next)?.querySelector("button").focus();
  const text = gone.length === 1 ? `“${gone[0].name}” is removed.` : `${gone.length} images are removed.`;
  note(text, "Undo", () => {
    // With what was added meanwhile.
    replace([...before, ...images.filter((image) => !before.includes(image))]);
  });
}

/** Forgets the images: a training has them. */
export function clear() {
  texts.clear();
  replace([]);
}

/** Takes over what another window of this browser has changed. */
function follow() {
  const saved = memory.get("train-images") ?? [];
  const list = saved.map((other) => images.find(({ id }) => id === other.id) ?? other);
  for (const [index, image] of list.entries()) if (image.caption !== saved[index].caption) setCaption(image, saved[index].caption);
  images = list;
  show();
}

/** `onChange` is called when images or captions have changed. */
export function listen(onChange) {
  changed = onChange;
  images = memory.get("train-images") ?? [];
  addEventListener("storage", ({ key }) => key === "kiln.train-images" && follow());
  const drop = $("train-drop");
  $("train-browse").onclick = () => $("train-files").click();
  $("train-files").onchange = () => trying(async () => {
    const files = [...$("train-files").files];
    // The same file may be chosen again.
    $("train-files").value = "";
    await add(files);
  });
  $("train-clear").onclick = () => remove(...images);
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
