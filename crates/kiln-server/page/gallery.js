// The gallery of generated images, newest first: search, favourites, selection, trash.

import { call, send } from "./api.js";
import { $, button, make, picture } from "./dom.js";
import { DRAGGED_IMAGE } from "./inputs.js";
import { note, trying } from "./notices.js";

/** The loaded images, newest first. */
export let images = [];
let search = "";
let open = () => {};
let compare = () => {};
/** The last image whose box was clicked: Shift selects up to it. */
let anchor = null;

const inTrash = () => $("gallery-filter").value === "trash";
const isFiltered = () => search || $("gallery-filter").value;
export const find = (id) => images.find((image) => image.id === id);
const cardOf = (image) => document.querySelector(`#grid [data-image="${image.id}"]`);
const plural = (n) => (n === 1 ? "The image" : `${n} images`);

export async function load(before) {
  const [searched, filter] = [search, $("gallery-filter").value];
  const query = new URLSearchParams({ limit: 60, ...(search && { search }), ...(filter && { [filter]: true }), ...(before && { before }) });
  const list = await call(`/v1/pictures?${query}`);
  // The search has changed meanwhile.
  if (searched !== search || filter !== $("gallery-filter").value) return;
  if (!before) {
    images = [];
    $("grid").replaceChildren();
  }
  images.push(...list.data);
  $("grid").append(...list.data.map(card));
  $("more").hidden = !list.more;
  update();
}

function update() {
  $("gallery-empty").hidden = images.length > 0;
  const empty = { favourite: "Images that you star appear here.", trash: "The trash is empty." };
  $("gallery-empty").textContent = search ? "No matching images." : empty[$("gallery-filter").value] ?? "Generated images appear here.";
  const chosen = selected();
  $("selection").hidden = chosen.length === 0;
  $("selection-count").textContent = `${chosen.length} selected`;
  $("compare").disabled = chosen.length !== 2;
  $("selection-star").hidden = inTrash();
  $("selection-star").textContent = chosen.length && chosen.every((image) => image.favourite) ? "Unstar" : "Star";
  $("selection-delete").textContent = inTrash() ? "Delete for good" : "Delete";
  $("selection-restore").hidden = !inTrash();
}

/** Adds a new image at the front. */
export function add(image) {
  if (isFiltered() || find(image.id)) return;
  insert(image);
}

/** Adds an image at its place. */
function insert(image) {
  const isOlder = (other) => other.created < image.created || (other.created === image.created && other.job === image.job && other.number < image.number);
  const index = images.findIndex(isOlder);
  const place = index < 0 ? null : cardOf(images[index]);
  images.splice(index < 0 ? images.length : index, 0, image);
  $("grid").insertBefore(card(image), place);
  update();
}

function take(gone) {
  for (const image of gone) cardOf(image)?.remove();
  images = images.filter((image) => !gone.includes(image));
  update();
}

const mark = async (list, marks) => (await send("PATCH", "/v1/pictures", { ids: list.map(({ id }) => id), ...marks })).data;

/** Moves images to the trash, which can be undone; from the trash, deletes them for good. */
export async function remove(list) {
  if (inTrash()) {
    for (const image of list) await call(`/v1/pictures/${image.id}`, { method: "DELETE" });
    take(list);
    return note(`${plural(list.length)} deleted for good.`);
  }
  await mark(list, { trash: true });
  take(list);
  return note(`${plural(list.length)} moved to the trash.`, "Undo", async () => {
    for (const image of await mark(list, { trash: false })) if (!inTrash() && !find(image.id)) insert(image);
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
  if (!favourite && $("gallery-filter").value === "favourite") take(list);
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
  const thumbnail = picture(image.thumbnail, { alt: prompt, loading: "lazy", width: 148, height: 148, draggable: true });
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
  $("more").onclick = () => trying(() => load(images.at(-1)?.id));
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
  let timer;
  $("search").oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      search = $("search").value.trim();
      trying(() => load());
    }, 200);
  };
}
