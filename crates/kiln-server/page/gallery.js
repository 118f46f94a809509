// The gallery of generated images, newest first: search, favourites, selection, trash.

import { call, send } from "./api.js";
import { onChange } from "./connection.js";
import { $, button, make } from "./dom.js";
import { DRAGGED_IMAGE } from "./inputs.js";
import { note, trying } from "./notices.js";
import { makeImage } from "./image.js";

/** Images per request: at first and with each click on "More", and to refresh the list. */
const [PAGE, MOST] = [60, 200];
/** Images per change of marks: the server's limit. */
const MARKED = 1000;
/** How often a list is read whose images change meanwhile. */
const ATTEMPTS = 4;
/** Time from a change in another window to the refresh, in milliseconds: changes come in groups. */
const REFRESH = 100;
/** The loaded images, newest first. */
export let images = [];
let search = "";
/** The search and the filter of the loaded images: the fields may be ahead of them. */
let shown = { search: "", filter: "" };
let open = () => {};
let compare = () => {};
/** The last image whose box was clicked: Shift selects up to it. */
let anchor = null;
/** Changes of images that the server has not confirmed yet, and the number of changes so far. */
let pending = Promise.resolve();
let changes = 0;
/** Tells the other windows of this browser about changes. */
const windows = new BroadcastChannel("kiln.gallery");

const wanted = () => ({ search, filter: $("gallery-filter").value });
const isWanted = (list) => list.search === search && list.filter === $("gallery-filter").value;
/** Whether the trash is shown. */
export const inTrash = () => shown.filter === "trash";
export const find = (id) => images.find((image) => image.id === id);
const cardOf = (image) => document.querySelector(`#grid [data-image="${image.id}"]`);
const plural = (n) => (n === 1 ? "The image" : `${n} images`);

/** Changes images on the server. */
async function changing(change) {
  changes += 1;
  const done = change();
  pending = Promise.allSettled([pending, done]);
  const result = await done;
  windows.postMessage("changed");
  return result;
}

/** Lists images as the server has them after all changes; nothing if the search or the filter has changed meanwhile. */
async function ask(before, limit = PAGE) {
  for (let attempts = 1; ; attempts++) {
    await pending;
    const [list, seen] = [wanted(), changes];
    const query = new URLSearchParams({ limit, ...(search && { search }), ...(list.filter && { [list.filter]: true }), ...(before && { before }) });
    const answer = await call(`/v1/images?${query}`);
    if (!isWanted(list)) return null;
    if (seen === changes || attempts === ATTEMPTS) return { ...list, ...answer };
  }
}

export async function load() {
  const list = await ask();
  if (list) show(list, list.data);
}

async function loadMore() {
  const before = images.at(-1)?.id;
  try {
    const list = await ask(before);
    if (list && images.at(-1)?.id === before) show(list, [...images, ...list.data]);
  } catch (error) {
    if (error.status !== 404) throw error;
    // The last image was deleted elsewhere.
    await refresh();
  }
}

/** Loads the images again, as many as there are: they were changed elsewhere. */
async function refresh(number = images.length) {
  const data = [];
  let list;
  do {
    list = await ask(data.at(-1)?.id, Math.min(MOST, Math.max(PAGE, number - data.length)));
    if (!list) return;
    data.push(...list.data);
  } while (list.more && data.length < number);
  show(list, data);
}

/** Shows a list. Cards of images that were shown before stay, with their selection and the focus. */
function show({ search, filter, more }, data) {
  shown = { search, filter };
  const known = new Map(images.map((image) => [image.id, image]));
  images = data.map((image) => Object.assign(known.get(image.id) ?? image, image));
  const cards = new Map([...$("grid").children].map((item) => [item.dataset.image, item]));
  const items = images.map((image) => cards.get(image.id) ?? card(image));
  const kept = new Set(items);
  for (const item of cards.values()) if (!kept.has(item)) item.remove();
  let place = $("grid").firstElementChild;
  for (const [index, item] of items.entries()) {
    if (item === place) place = place.nextElementSibling;
    else $("grid").insertBefore(item, place);
    showStar(item, images[index]);
  }
  $("more").hidden = !more;
  update();
}

function update() {
  $("gallery-empty").hidden = images.length > 0;
  const empty = { favourite: "Images that you star appear here.", trash: "The trash is empty." };
  $("gallery-empty").textContent = shown.search ? "No matching images." : empty[shown.filter] ?? "Generated images appear here.";
  const chosen = selected();
  $("selection").hidden = chosen.length === 0;
  $("selection-count").textContent = `${chosen.length} selected`;
  $("compare").disabled = chosen.length !== 2;
  $("selection-star").hidden = inTrash();
  $("selection-star").textContent = chosen.length && chosen.every((image) => image.favourite) ? "Unstar" : "Star";
  $("selection-delete").textContent = inTrash() ? "Delete for good" : "Delete";
  $("selection-restore").hidden = !inTrash();
}

/** Adds a new image at its place. */
export function add(image) {
  // A list that is on its way may be without it.
  changes += 1;
  if (shown.search || shown.filter || find(image.id)) return;
  const isOlder = (other) => other.created < image.created || (other.created === image.created && other.job === image.job && other.number < image.number);
  const index = images.findIndex(isOlder);
  const place = index < 0 ? null : cardOf(images[index]);
  images.splice(index < 0 ? images.length : index, 0, image);
  $("grid").insertBefore(card(image), place);
  windows.postMessage("changed");
  update();
}

function take(gone) {
  const ids = new Set(gone.map(({ id }) => id));
  for (const image of gone) cardOf(image)?.remove();
  images = images.filter(({ id }) => !ids.has(id));
  update();
}

/** Changes the marks of images; returns the changed images. */
async function mark(list, marks) {
  try {
    return await changing(async () => {
      const [ids, changed] = [list.map(({ id }) => id), []];
      while (ids.length) changed.push(...(await send("PATCH", "/v1/images", { ids: ids.splice(0, MARKED), ...marks })).data);
      return changed;
    });
  } catch (error) {
    // One of them was deleted elsewhere.
    if (error.status === 404) await refresh();
    throw error;
  }
}

async function deleteForGood(list) {
  for (const image of list) {
    try {
      await call(`/v1/images/${image.id}`, { method: "DELETE" });
    } catch (error) {
      // It was deleted elsewhere.
      if (error.status !== 404) throw error;
    }
    take([image]);
  }
}

/** Moves images to the trash, which can be undone; from the trash, deletes them for good. */
export async function remove(list) {
  if (inTrash()) {
    await changing(() => deleteForGood(list));
    return note(`${plural(list.length)} deleted for good.`);
  }
  await mark(list, { trash: true });
  take(list);
  return note(`${plural(list.length)} moved to the trash.`, "Undo", async () => {
    await mark(list, { trash: false });
    await refresh(images.length + list.length);
  });
}

async function restore(list) {
  await mark(list, { trash: false });
  take(list);
  note(`${plural(list.length)} restored.`);
}

/** Stars images, or takes the stars away. */
export async function star(list, favourite) {
  for (const changed of await mark(list, { favourite })) {
    const image = find(changed.id);
    if (!image) continue;
    image.favourite = favourite;
    showStar(cardOf(image), image);
  }
  if (!favourite && shown.filter === "favourite") take(list);
  update();
}

function showStar(item, image) {
  const star = item.querySelector(".star");
  star.setAttribute("aria-pressed", image.favourite);
  star.textContent = image.favourite ? "★" : "☆";
}

function selected() {
  const ids = [...$("grid").querySelectorAll(":checked")].map((box) => box.closest("li").dataset.image);
  return images.filter((image) => ids.includes(image.id));
}

function clearSelection() {
  for (const box of $("grid").querySelectorAll(":checked")) box.checked = false;
  update();
}

/** Selects all images between the last clicked box and this one. */
function selectRange(image, checked) {
  const [a, b] = [images.indexOf(find(anchor)), images.indexOf(image)].sort((x, y) => x - y);
  if (a < 0) return;
  for (const between of images.slice(a, b + 1)) cardOf(between).querySelector("input").checked = checked;
}

function card(image) {
  const { prompt } = image;
  const thumbnail = makeImage(image.thumbnail, { alt: prompt, loading: "lazy", width: 148, height: 148, draggable: true });
  const show = make("button", { type: "button", className: "open", title: prompt, onclick: () => open(image) }, thumbnail);
  const box = make("input", { type: "checkbox", "aria-label": `Select: ${prompt}` });
  box.onclick = (event) => {
    if (event.shiftKey) selectRange(image, box.checked);
    anchor = image.id;
    update();
  };
  const star = button("☆", () => trying(() => starOne(image)), { className: "star", "aria-label": `Favourite: ${prompt}` });
  const item = make("li", {}, show, make("span", { className: "select" }, box), star);
  item.dataset.image = image.id;
  thumbnail.ondragstart = (event) => {
    event.dataTransfer.setData(DRAGGED_IMAGE, image.id);
    event.dataTransfer.effectAllowed = "copy";
  };
  showStar(item, image);
  return item;
}

const starOne = (image) => star([image], !image.favourite);

export function listen(options) {
  ({ open, compare } = options);
  $("more").onclick = () => trying(loadMore);
  $("compare").onclick = () => compare(...selected());
  $("gallery-filter").onchange = () => trying(() => load());
  $("selection-clear").onclick = clearSelection;
  $("selection-all").onclick = () => {
    for (const box of $("grid").querySelectorAll("input")) box.checked = true;
    update();
  };
  const withSelected = (act) => () => trying(async () => {
    await act(selected());
    clearSelection();
  });
  $("selection-star").onclick = withSelected((list) => star(list, !list.every((image) => image.favourite)));
  $("selection-delete").onclick = withSelected(remove);
  $("selection-restore").onclick = withSelected(restore);
  let stale;
  const refreshSoon = () => {
    clearTimeout(stale);
    // If the server can't be reached, a banner says so.
    stale = setTimeout(() => refresh().catch(() => {}), REFRESH);
  };
  windows.onmessage = refreshSoon;
  onChange((reachable) => reachable && refreshSoon());
  // Another device may have changed it.
  document.addEventListener("visibilitychange", () => document.hidden || refreshSoon());
  let timer;
  $("search").oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      search = $("search").value.trim();
      trying(() => load());
    }, 200);
  };
}
