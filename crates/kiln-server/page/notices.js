// Messages: errors stay until they are closed, notes with an action such as "Undo" go by themselves. None replaces another.

import { $, button, make, memory } from "./dom.js";

/** How long a note is shown, in milliseconds; one with an action longer. */
const [SHORT, LONG] = [4000, 10_000];
/** The most messages of a kind. */
const MOST = 20;

/** Shows an error above the earlier ones until it is closed. One with a topic goes when that is cleared. */
export function fail(message, topic = "") {
  const same = [...$("alerts").children].find((alert) => alert.querySelector(".alert-text").textContent === message);
  const number = Number(same?.dataset.number ?? 0) + 1;
  same?.remove();
  const close = button("✕", () => closeAlert(alert), { className: "quiet alert-close", "aria-label": "Close the message" });
  const alert = make("div", { className: "alert", role: "alert" }, make("p", { className: "alert-text", textContent: message }));
  if (number > 1) alert.append(make("span", { className: "note times", textContent: `${number} times` }));
  alert.append(close);
  Object.assign(alert.dataset, { topic, number });
  $("alerts").prepend(alert);
  while ($("alerts").children.length > MOST) $("alerts").lastElementChild.remove();
  showCount();
}

function closeAlert(alert) {
  const next = alert.nextElementSibling ?? alert.previousElementSibling;
  const hadFocus = alert.contains(document.activeElement);
  alert.remove();
  showCount();
  // For the keyboard: on to the next message.
  if (hadFocus) next?.querySelector("button").focus();
}

function showCount() {
  const number = $("alerts").children.length;
  $("alerts-close").hidden = number < 2;
  $("alerts-close").textContent = `Close all ${number}`;
}

/** Closes the errors of a topic. */
export function clearFailures(topic) {
  for (const alert of [...$("alerts").children]) if (alert.dataset.topic === topic) alert.remove();
  showCount();
}

/** Runs an action and shows its error, if any. */
export async function trying(action, topic) {
  try {
    return await action();
  } catch (error) {
    fail(error.message || String(error), topic);
    return undefined;
  }
}

/** Wraps the action of a button: its error is shown, and while it runs a second press does nothing. */
export function exclusive(action) {
  let running = false;
  return async (...args) => {
    if (running) return;
    running = true;
    await trying(() => action(...args));
    running = false;
  };
}

/** Shows a note, with an action that may be taken while it is shown. */
export function note(text, name, act) {
  const toast = make("div", { className: "toast", role: "status" }, make("p", { className: "toast-text", textContent: text }));
  let timer;
  const close = () => {
    clearTimeout(timer);
    toast.remove();
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(close, act ? LONG : SHORT);
  };
  if (act) {
    toast.append(button(name, () => {
      close();
      trying(act);
    }, { className: "toast-action" }));
  }
  toast.append(button("✕", close, { className: "quiet toast-close", "aria-label": "Close the note" }));
  // Don't take a note away from under the pointer or the focus.
  for (const event of ["pointerenter", "focusin"]) toast.addEventListener(event, () => clearTimeout(timer));
  for (const event of ["pointerleave", "focusout"]) toast.addEventListener(event, later);
  $("toasts").prepend(toast);
  // A note without an action needs no room beside newer ones.
  const plain = [...$("toasts").children].slice(1).filter((other) => !other.querySelector(".toast-action"));
  for (const other of plain) other.remove();
  while ($("toasts").children.length > MOST) $("toasts").lastElementChild.remove();
  later();
}

/** Takes the action of the newest note that has one; returns whether there was one. */
export function takeAction() {
  const action = $("toasts").querySelector(".toast-action");
  action?.click();
  return action !== null;
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
  $("alerts-close").onclick = () => {
    $("alerts").replaceChildren();
    showCount();
  };
  // Browsers allow notifications only on secure pages.
  $("bell").hidden = !globalThis.Notification;
  $("bell").onclick = () => trying(toggleBell);
  showBell();
}
