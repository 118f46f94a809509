// The pictures of a new training, with their captions. They stay in this browser until a training has them or the user
// removes them: no error of the server or the network does.

import { $, button, make, memory, setText, whenReleased } from "./dom.js";
import { fail, note, trying } from "./notices.js";
import { showImage } from "./picture.js";
import { upload } from "./upload.js";

/** `{ id, name, caption, missing }` of uploaded pictures; `missing`: the server no longer has it. */
let pictures = [];
/** Their cards, by picture: created once, so that a caption that is being typed stays. */
const cards = new Map();
/** Captions of text files whose pictures have not come yet, by name without extension. */
const texts = new Map();
let uploading = 0;
/** The part of the current upload that is sent. */
let sent = 0;
/** The most pictures of a training. */
const MOST = 1000;
let changed = () => {};

const stem = (name) => name.replace(/\.[^.]*$/, "").toLowerCase();
const plural = (n) => (n === 1 ? "picture" : "pictures");

export const isUploading = () => uploading > 0;
export const values = () => pictures.map(({ id, name, caption }) => ({ image: id, name, caption }));
export const count = () => pictures.length;
/** The number of pictures without a caption. */
export const uncaptioned = () => pictures.filter(({ caption }) => !caption.trim()).length;
/** The names of pictures that the server no longer has. */
export const missing = () => pictures.filter((picture) => picture.missing).map(({ name }) => name);

function save() {
  memory.set("train-pictures", pictures.map(({ id, name, caption }) => ({ id, name, caption })));
}

/** Takes an uploaded picture: a new one, or one that the server no longer had. */
function take(id, name) {
  const known = pictures.find((picture) => picture.missing && (picture.id === id || picture.name === name));
  if (known) Object.assign(known, { id, missing: false });
  else pictures.push({ id, name, caption: texts.get(stem(name)) ?? "" });
  if (known) showPicture(known);
}

/** Adds captions from text files to the pictures of the same names. */
async function addCaptions(files) {
  for (const file of files) {
    const [name, text] = [stem(file.name), (await file.text()).trim()];
    const found = pictures.find((picture) => stem(picture.name) === name);
    if (!found) texts.set(name, text);
    else if (!found.caption) setCaption(found, text);
  }
}

/** Adds pictures, and captions from text files of the same names. */
export async function add(files) {
  const all = [...files];
  const isText = ({ name }) => /\.(txt|caption)$/i.test(name);
  await addCaptions(all.filter(isText));
  const images = all.filter(({ type }) => type.startsWith("image/"));
  const others = all.filter((file) => !file.type.startsWith("image/") && !isText(file));
  if (others.length) fail(`Not used: ${others.slice(0, 5).map(({ name }) => `“${name}”`).join(", ")}${others.length > 5 ? ` and ${others.length - 5} more` : ""}. A training takes images and .txt files.`);
  if (pictures.length + uploading + images.length > MOST) return fail(`A training takes at most ${MOST} pictures.`);
  uploading += images.length;
  show();
  const failures = [];
  for (const file of images) {
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
  if (failures.length) fail(`${failures.length === 1 ? "A picture" : `${failures.length} pictures`} can't be used. ${failures.slice(0, 3).join(" ")}`);
  save();
  changed();
}

function showCount() {
  const part = sent > 0 && sent < 1 ? `, ${Math.floor(100 * sent)} % of the next` : "";
  setText($("train-count"), uploading ? `Uploading, ${uploading} left${part}…` : pictures.length ? `${pictures.length} ${plural(pictures.length)}` : "");
}

function show() {
  const items = pictures.map((picture) => {
    if (!cards.has(picture)) cards.set(picture, card(picture));
    return cards.get(picture);
  });
  for (const [picture, item] of cards) if (!pictures.includes(picture)) item.remove();
  // Only what is new moves: the field with the focus stays where it is.
  for (const [index, item] of items.entries()) {
    const place = $("train-pictures").children[index];
    if (place !== item) $("train-pictures").insertBefore(item, place ?? null);
    item.querySelector("textarea").setAttribute("aria-label", `Caption of picture ${index + 1}, ${pictures[index].name}`);
  }
  showCount();
  $("train-clear").hidden = pictures.length === 0;
}

function card(picture) {
  const caption = make("textarea", { rows: 2, value: picture.caption, placeholder: "What it shows" });
  caption.oninput = () => {
    picture.caption = caption.value;
    save();
  };
  caption.onchange = () => changed();
  const image = make("img", { alt: picture.name, title: picture.name });
  const gone = make("p", { className: "gone", hidden: true, textContent: "No longer on the server. Add this file again; its caption is kept." });
  const item = make("li", {}, image, gone, make("p", { className: "note file-name", textContent: picture.name }), caption,
    button("✕", () => remove(picture), { className: "quiet icon", "aria-label": `Remove ${picture.name}` }));
  cards.set(picture, item);
  showPicture(picture);
  return item;
}

/** Shows the picture itself. The server keeps uploads for some hours, and only for who uploaded them. */
function showPicture(picture) {
  const item = cards.get(picture);
  const showGone = () => {
    item.querySelector(".gone").hidden = !picture.missing;
    item.querySelector("img").hidden = picture.missing === true;
  };
  showGone();
  showImage(item.querySelector("img"), `/v1/inputs/${picture.id}`, () => {
    picture.missing = true;
    whenReleased(showGone);
  });
}

function setCaption(picture, text) {
  picture.caption = text;
  const field = cards.get(picture)?.querySelector("textarea");
  if (field) field.value = text;
}

/** Replaces the pictures, and tells that. */
function replace(list) {
  pictures = list;
  save();
  show();
  changed();
}

/** Removes pictures with their captions, which can be undone. */
function remove(...gone) {
  const before = pictures;
  const focused = cards.get(gone[0])?.contains(document.activeElement);
  const next = pictures[pictures.indexOf(gone[0]) + 1];
  replace(pictures.filter((picture) => !gone.includes(picture)));
  if (focused) cards.get(next)?.querySelector("button").focus();
  const text = gone.length === 1 ? `“${gone[0].name}” is removed.` : `${gone.length} pictures are removed.`;
  note(text, "Undo", () => {
    // With what was added meanwhile.
    replace([...before, ...pictures.filter((picture) => !before.includes(picture))]);
  });
}

/** Forgets the pictures: a training has them. */
export function clear() {
  texts.clear();
  replace([]);
}

/** Takes over what another window of this browser has changed. */
function follow() {
  const saved = memory.get("train-pictures") ?? [];
  const list = saved.map((other) => pictures.find(({ id }) => id === other.id) ?? other);
  for (const [index, picture] of list.entries()) if (picture.caption !== saved[index].caption) setCaption(picture, saved[index].caption);
  pictures = list;
  show();
}

/** `onChange` is called when pictures or captions have changed. */
export function listen(onChange) {
  changed = onChange;
  pictures = memory.get("train-pictures") ?? [];
  addEventListener("storage", ({ key }) => key === "kiln.train-pictures" && follow());
  const drop = $("train-drop");
  $("train-browse").onclick = () => $("train-files").click();
  $("train-files").onchange = () => trying(async () => {
    const files = [...$("train-files").files];
    // The same file may be chosen again.
    $("train-files").value = "";
    await add(files);
  });
  $("train-clear").onclick = () => remove(...pictures);
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
