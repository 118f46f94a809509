// Helpers for the document.

export const $ = (id) => document.getElementById(id);

/** Creates an element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function button(text, onclick, properties = {}) {
  return make("button", { type: "button", textContent: text, onclick, ...properties });
}

export const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

/** A drop-down list's choices. */
export const options = (pairs) => pairs.map(([value, textContent]) => make("option", { value, textContent }));

/** Changes a text only if it differs: screen readers announce every change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The longest press that things wait for, in milliseconds; a longer one is a drag. */
const PRESS = 2000;
let pressed = null;
let waiting = [];

function release() {
  clearTimeout(pressed);
  pressed = null;
  const actions = waiting;
  waiting = [];
  for (const action of actions) action();
}

// The press of a pointer takes the focus from a field, whose change may move the button under the pointer.
for (const name of ["pointerdown", "mousedown"]) {
  document.addEventListener(name, () => {
    clearTimeout(pressed);
    pressed = setTimeout(release, PRESS);
  }, true);
}
// After the click.
for (const name of ["pointerup", "mouseup", "pointercancel", "dragend"]) document.addEventListener(name, () => pressed && setTimeout(release), true);

/** Runs what moves or replaces elements, but not under a pressed pointer: the click would miss its button. */
export function whenReleased(action) {
  if (pressed === null) action();
  else waiting.push(action);
}

/** Opens a dialog. Notices move into it: what is outside a modal dialog can't be used. */
export function openDialog(dialog) {
  if (!dialog.open) dialog.showModal();
  dialog.append($("notices"));
}

// `close` does not bubble.
document.addEventListener("close", () => {
  const open = document.querySelectorAll("dialog[open]");
  (open.length ? open[open.length - 1] : document.body).append($("notices"));
}, true);

export const isDialogOpen = () => document.querySelector("dialog[open]") !== null;

/** Whether the keyboard belongs to this element. */
export const isField = (element) => element.matches("input:not([type=range], [type=checkbox]), textarea, select");

export function seconds(n) {
  if (n < 60) return `${Math.max(1, Math.round(n))} s`;
  return `${Math.floor(n / 60)} min ${Math.round(n % 60)} s`;
}

export function bytes(n) {
  if (n < 1 << 20) return `${Math.round(n / 1024)} KiB`;
  return n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(1)} GiB`;
}

/** Saves a file from the page. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Values saved in this browser, where it allows that. */
export const memory = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`kiln.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`kiln.${name}`, JSON.stringify(value));
    } catch {
      // Private windows may have no storage.
    }
  },
};
