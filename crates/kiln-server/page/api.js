// Calls to the server.

import { $, memory } from "./dom.js";

const client = memory.get("client") ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
memory.set("client", client);

/** One question for the key at a time, however many calls need it. */
let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const [dialog, form] = [$("key-dialog"), $("key-form")];
    form.onsubmit = async (event) => {
      event.preventDefault();
      const key = $("key").value;
      const answer = await fetch("/v1/session", { method: "POST", headers: { authorization: `Bearer ${key}` } });
      $("key-wrong").hidden = answer.ok;
      if (answer.ok) {
        dialog.close();
        asking = null;
        resolve();
      }
    };
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
  });
  return asking;
}

/** Calls the server; an error has the server's own words. */
export async function call(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { "x-client-id": client, ...options.headers } });
  } catch {
    throw new Error("The server can't be reached. Is it still running?");
  }
  if (answer.status === 401) {
    await askForKey();
    return call(path, options);
  }
  if (!answer.ok) {
    let message = `${answer.status} ${answer.statusText}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      // Not in our words: a proxy's, perhaps.
    }
    const error = new Error(message.charAt(0).toUpperCase() + message.slice(1));
    error.status = answer.status;
    throw error;
  }
  return answer.status === 204 ? null : answer.json();
}

export const post = (path, body) =>
  call(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** Sends a picture; the answer has its name and size. */
export const send = (blob) =>
  call("/v1/inputs", { method: "POST", headers: { "content-type": "application/octet-stream" }, body: blob });

/** Follows an order: `on` is told of progress, previews, pictures and the end. */
export function follow(id, on) {
  const source = new EventSource(`/v1/jobs/${id}/events?previews=true`);
  let over = false;
  for (const name of ["progress", "preview", "picture"]) {
    source.addEventListener(name, (event) => on[name]?.(JSON.parse(event.data)));
  }
  source.addEventListener("end", (event) => {
    over = true;
    source.close();
    on.end(JSON.parse(event.data));
  });
  // The browser tries again by itself, unless the server says no for good.
  source.onerror = async () => {
    if (over || source.readyState !== EventSource.CLOSED) return;
    over = true;
    try {
      on.end(await call(`/v1/jobs/${id}`));
    } catch (error) {
      on.lost(error);
    }
  };
}
