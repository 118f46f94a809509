// Messages: errors stay until they are closed, notes with an action such as "Undo" go by themselves.

import { $, memory } from "./dom.js";

/** How long a note is shown, in milliseconds; one with an action longer. */
const [SHORT, LONG] = [4000, 10_000];
let timer = null;
let action = null;

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

/** Shows a note, with an action that may be taken while it is shown. */
export function note(text, name, act) {
  clearTimeout(timer);
  $("toast-text").textContent = text;
  $("toast-action").hidden = !act;
  $("toast-action").textContent = name ?? "";
  action = act ?? null;
  $("toast").hidden = false;
  timer = setTimeout(closeNote, act ? LONG : SHORT);
}

function closeNote() {
  clearTimeout(timer);
  $("toast").hidden = true;
  action = null;
}

/** Takes the action of the note that is shown; returns whether there was one. */
export function takeAction() {
  const act = action;
  closeNote();
  if (act) trying(act);
  return act !== null;
}

/** Tells the user in another window that a job has ended, if that is wanted. */
export function notifyOutside(title, body, icon) {
  if (!memory.get("notify") || document.visibilityState === "visible" || globalThis.Notification?.permission !== "granted") return;
  const notice = new Notification(title, { body, icon, tag: "kiln" });
  notice.onclick = () => {
    window.focus();
    notice.close();
  };
}

function showBell() {
  const on = memory.get("notify") === true && globalThis.Notification?.permission === "granted";
  $("bell").setAttribute("aria-pressed", on);
}

async function toggleBell() {
  if (memory.get("notify") && Notification.permission === "granted") {
    memory.set("notify", false);
  } else if ((await Notification.requestPermission()) === "granted") {
    memory.set("notify", true);
    note("You will be notified when a job ends while this page is in the background.");
  } else {
    fail("This browser does not allow notifications for this page. Change that in the site's settings.");
  }
  showBell();
}

export function listen() {
  $("alert-close").onclick = clearFailure;
  $("toast-close").onclick = closeNote;
  $("toast-action").onclick = takeAction;
  // Don't take a note away from under the pointer or the focus.
  for (const name of ["pointerenter", "focusin"]) $("toast").addEventListener(name, () => clearTimeout(timer));
  $("toast").onpointerleave = () => (timer = setTimeout(closeNote, SHORT));
  // Browsers allow notifications only on secure pages.
  $("bell").hidden = !globalThis.Notification;
  $("bell").onclick = () => trying(toggleBell);
  showBell();
}
