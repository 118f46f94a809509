// The gallery of generated images, newest first: search, select, delete.

import { call } from "./api.js";
import { $, make, trying } from "./dom.js";

/** The loaded images, newest first. */
export let images = [];
let search = "";
let open = () => {};
let compare = () => {};

export function listen(options) {
  ({ open, compare } = options);
  $("more").onclick = () => trying(() => load(images.at(-1)?.id));
  $("compare").onclick = () => compare(...selected());
  let timer;
  $("search").oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      search = $("search").value.trim();
      trying(() => load());
    }, 200);
  };
}

export async function load(before) {
  const searched = search;
  const query = new URLSearchParams({ limit: 60, ...(search && { search }), ...(before && { before }) });
  const list = await call(`/v1/pictures?${query}`);
  // The search has changed meanwhile.
  if (searched !== search) return;
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
  $("gallery-empty").textContent = search ? "No matching images." : "Generated images appear here.";
  $("compare").disabled = selected().length !== 2;
}

/** Adds a new image at the front. */
export function add(image) {
  if (search || images.some((other) => other.id === image.id)) return;
  images.unshift(image);
  $("grid").prepend(card(image));
  update();
}

export async function remove(image) {
  await call(`/v1/pictures/${image.id}`, { method: "DELETE" });
  images = images.filter((other) => other.id !== image.id);
  document.querySelector(`[data-image="${image.id}"]`)?.remove();
  update();
}

/** The images selected for comparison. */
function selected() {
  const ids = [...$("grid").querySelectorAll(":checked")].map((box) => box.closest("li").dataset.image);
  return images.filter((image) => ids.includes(image.id));
}

function card(image) {
  const { prompt } = image;
  const thumbnail = make("img", { src: image.thumbnail, alt: prompt, loading: "lazy", width: 148, height: 148 });
  const show = make("button", { type: "button", className: "open", title: prompt, onclick: () => open(image) }, thumbnail);
  const box = make("input", { type: "checkbox", "aria-label": `Select for comparison: ${prompt}` });
  box.onchange = () => {
    // A third selection replaces the first.
    const others = [...$("grid").querySelectorAll(":checked")].filter((other) => other !== box);
    if (box.checked && others.length > 1) others[0].checked = false;
    update();
  };
  const item = make("li", {}, show, make("span", { className: "select" }, box));
  item.dataset.image = image.id;
  return item;
}
