// Calls to the server.

import { untilReachable } from "./connection.js";
import { $, memory, openDialog } from "./dom.js";
import { trying } from "./notices.js";

const client = memory.get("client") ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
memory.set("client", client);
/** Silence of a job's events after which the connection is checked, and the pause before events are opened again, in ms. */
const [SILENCE, PAUSE] = [15_000, 1000];

/** The open key dialog; calls that need the key share it. */
let keyDialog = null;

function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const [dialog, form] = [$("key-dialog"), $("key-form")];
    form.onsubmit = async (event) => {
      event.preventDefault();
      const key = $("key").value;
      const response = await fetch("/v1/session", { method: "POST", headers: { authorization: `Bearer ${key}` } });
      $("key-wrong").hidden = response.ok;
      if (response.ok) {
        showSignOut(true);
        dialog.close();
        keyDialog = null;
        resolve();
      }
    };
    dialog.oncancel = (event) => event.preventDefault();
    openDialog(dialog);
  });
  return keyDialog;
}

/** Offers to end the session; remembered, because scripts can't see its cookie. */
function showSignOut(signedIn) {
  memory.set("signed-in", signedIn);
  $("sign-out").hidden = !signedIn;
}

/** Ends the session, and asks for the key again. */
async function signOut() {
  await call("/v1/session", { method: "DELETE" });
  showSignOut(false);
  location.reload();
}

showSignOut(memory.get("signed-in") === true);
$("sign-out").onclick = () => trying(signOut);

/** Calls the server; throws an error with the server's message. */
export async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "x-client-id": client, ...options.headers } });
  } catch {
    untilReachable();
    throw new Error("The server can't be reached. Is it still running?");
  }
  if (response.status === 401) {
    await askForKey();
    return call(path, options);
  }
  if (!response.ok) {
    let message = `${response.status} ${response.statusText}`;
    try {
      message = (await response.json()).error.message;
    } catch {
      // Not the server's format; perhaps a proxy's response.
    }
    const error = new Error(message.charAt(0).toUpperCase() + message.slice(1));
    error.status = response.status;
    throw error;
  }
  return response.status === 204 ? null : response.json();
}

/** Sends JSON: a value, or text that is JSON already. */
export const send = (method, path, body) => call(path, {
  method,
  headers: { "content-type": "application/json" },
  body: typeof body === "string" ? body : JSON.stringify(body),
});

/** Uploads an image; returns its name and size. */
export const upload = (blob) =>
  call("/v1/inputs", { method: "POST", headers: { "content-type": "application/octet-stream" }, body: blob });

const isFinal = (view) => view.status !== "queued" && view.status !== "running";

/**
 * Follows a job: calls `on.progress`, `on.preview`, `on.picture`, and finally `on.end` or `on.lost`. If the server goes
 * away, events continue when it is back. Returns a function that stops it.
 */
export function follow(id, on) {
  let source = null;
  let timer = null;
  let stopped = false;
  const stop = () => {
    clearInterval(timer);
    source.close();
  };
  const end = (view) => {
    stop();
    on.end(view);
  };
  const reopen = async () => {
    stop();
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
    await untilReachable();
    if (stopped) return;
    try {
      const view = await call(`/v1/jobs/${id}`);
      if (isFinal(view)) on.end(view);
      else open();
    } catch (error) {
      if (error.status) on.lost(error);
      else reopen();
    }
  };
  const open = () => {
    let heard = Date.now();
    source = new EventSource(`/v1/jobs/${id}/events?previews=true`);
    for (const name of ["progress", "preview", "picture"]) {
      source.addEventListener(name, (event) => {
        heard = Date.now();
        on[name]?.(JSON.parse(event.data));
      });
    }
    source.addEventListener("end", (event) => {
      const view = JSON.parse(event.data);
      // A job that is not final waits for the next start of the server.
      if (isFinal(view)) end(view);
      else reopen();
    });
    source.onerror = reopen;
    // A connection may die without an error.
    timer = setInterval(() => Date.now() - heard > SILENCE && untilReachable(), SILENCE);
  };
  open();
  return () => {
    stopped = true;
    stop();
  };
}
