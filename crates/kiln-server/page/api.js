// Calls to the server.

import { $, memory } from "./dom.js";

const client = memory.get("client") ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
memory.set("client", client);

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
        dialog.close();
        keyDialog = null;
        resolve();
      }
    };
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
  });
  return keyDialog;
}

/** Calls the server; throws an error with the server's message. */
export async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "x-client-id": client, ...options.headers } });
  } catch {
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

/** Uploads an image; returns its name and size. */
export const upload = (blob) =>
  call("/v1/inputs", { method: "POST", headers: { "content-type": "application/octet-stream" }, body: blob });

/** Follows a job: calls `on.progress`, `on.preview`, `on.picture`, and finally `on.end` or `on.lost`. */
export function follow(id, on) {
  const source = new EventSource(`/v1/jobs/${id}/events?previews=true`);
  let ended = false;
  for (const name of ["progress", "preview", "picture"]) {
    source.addEventListener(name, (event) => on[name]?.(JSON.parse(event.data)));
  }
  source.addEventListener("end", (event) => {
    ended = true;
    source.close();
    on.end(JSON.parse(event.data));
  });
  // The browser reconnects by itself, unless the server refuses.
  source.onerror = async () => {
    if (ended || source.readyState !== EventSource.CLOSED) return;
    ended = true;
    try {
      on.end(await call(`/v1/jobs/${id}`));
    } catch (error) {
      on.lost(error);
    }
  };
}
