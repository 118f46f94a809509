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

/** Shows an error until it is closed or a job succeeds. */
export function fail(message) {
  $("alert-text").textContent = message;
  $("alert").hidden = false;
}

export function clearFailure() {
  $("alert").hidden = true;
}

/** Runs an action and shows its error, if any. */
export async function trying(action) {
  try {
    return await action();
  } catch (error) {
    fail(error.message || String(error));
    return undefined;
  }
}

export function seconds(n) {
  if (n < 60) return `${Math.max(1, Math.round(n))} s`;
  return `${Math.floor(n / 60)} min ${Math.round(n % 60)} s`;
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
