// What was made: newest first, searched, compared, deleted.

import { call } from "./api.js";
import { $, make, trying } from "./dom.js";

/** Pictures on the page, newest first. */
export let pictures = [];
let search = "";
let open = () => {};
let compare = () => {};

export function listen(options) {
  ({ open, compare } = options);
  $("more").onclick = () => trying(() => load(pictures.at(-1)?.id));
  $("compare").onclick = () => compare(...picked());
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
  const asked = search;
  const query = new URLSearchParams({ limit: 60, ...(search && { search }), ...(before && { before }) });
  const list = await call(`/v1/pictures?${query}`);
  // An answer to a question that is no longer asked.
  if (asked !== search) return;
  if (!before) {
    pictures = [];
    $("grid").replaceChildren();
  }
  pictures.push(...list.data);
  $("grid").append(...list.data.map(card));
  $("more").hidden = !list.more;
  tell();
}

function tell() {
  $("gallery-empty").hidden = pictures.length > 0;
  $("gallery-empty").textContent = search ? "Nothing fits these words." : "Pictures that you make are kept here.";
  $("compare").disabled = picked().length !== 2;
}

/** Adds a new picture in front. */
export function add(picture) {
  if (search || pictures.some((p) => p.id === picture.id)) return;
  pictures.unshift(picture);
  $("grid").prepend(card(picture));
  tell();
}

export async function remove(picture) {
  await call(`/v1/pictures/${picture.id}`, { method: "DELETE" });
  pictures = pictures.filter((p) => p.id !== picture.id);
  document.querySelector(`[data-picture="${picture.id}"]`)?.remove();
  tell();
}

function picked() {
  const ids = [...$("grid").querySelectorAll(":checked")].map((box) => box.closest("li").dataset.picture);
  return pictures.filter((p) => ids.includes(p.id));
}

function card(picture) {
  const words = picture.prompt;
  const image = make("img", { src: picture.thumbnail, alt: words, loading: "lazy", width: 148, height: 148 });
  const show = make("button", { type: "button", className: "open", title: words, onclick: () => open(picture) }, image);
  const box = make("input", { type: "checkbox", "aria-label": `Choose for comparing: ${words}` });
  box.onchange = () => {
    // A third choice replaces the first.
    const chosen = [...$("grid").querySelectorAll(":checked")].filter((other) => other !== box);
    if (box.checked && chosen.length > 1) chosen[0].checked = false;
    tell();
  };
  const item = make("li", {}, show, make("span", { className: "pick" }, box));
  item.dataset.picture = picture.id;
  return item;
}
