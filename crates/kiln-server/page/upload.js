// Uploads of images. They may take long; one without progress is given up, and sent again when the server is back.

import { call, watch } from "./api.js";

/** The longest time without progress, in ms. */
const IDLE = 30_000;
/** The number of uploads on their way. */
let number = 0;

export const uploads = () => number;

/** One attempt of an upload: `fetch` does not tell its progress. */
const exchange = (onProgress) => (path, { method, headers, body, limit }) =>
  new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const watched = watch(limit, (error) => {
      reject(error);
      request.abort();
    });
    request.open(method, path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = ({ loaded, total }) => {
      watched.heard();
      onProgress(total ? loaded / total : 1);
    };
    request.onerror = request.onabort = () => reject(new Error("the connection broke"));
    request.onloadend = watched.stop;
    request.onload = () => {
      const { status, statusText, responseText } = request;
      const ok = status >= 200 && status < 300;
      try {
        resolve({ ok, status, statusText, body: ok ? JSON.parse(responseText) : responseText });
      } catch (error) {
        reject(error);
      }
    };
    request.send(body);
  });

/** Uploads an image; returns its name and size. Calls `onProgress` with the part that is sent. */
export async function upload(blob, onProgress = () => {}) {
  number += 1;
  try {
    // The same bytes have the same name: repeating is harmless.
    return await call("/v1/inputs", {
      method: "POST", headers: { "content-type": "application/octet-stream" }, body: blob, by: exchange(onProgress), again: true, limit: IDLE,
    });
  } finally {
    number -= 1;
  }
}

// Leaving the page would end them.
addEventListener("beforeunload", (event) => number > 0 && event.preventDefault());
