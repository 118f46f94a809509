// Small helpers around the document.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
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

/** Says plainly that something failed, until it is closed or something works again. */
export function fail(message) {
  $("alert-text").textContent = message;
  $("alert").hidden = false;
}

export function clearFailure() {
  $("alert").hidden = true;
}

/** Runs something that may fail, and says so if it does. */
export async function trying(work) {
  try {
    return await work();
  } catch (error) {
    fail(error.message || String(error));
    return undefined;
  }
}

export function seconds(n) {
  if (n < 60) return `${Math.max(1, Math.round(n))} s`;
  return `${Math.floor(n / 60)} min ${Math.round(n % 60)} s`;
}

/** Remembers a value in this browser; without room or permission it is forgotten. */
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
      // Private windows may have none.
    }
  },
};
