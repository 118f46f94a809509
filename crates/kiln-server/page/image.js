// Images of the server. One that can't be loaded is tried again; only the server's word that it is gone ends that.

import { call } from "./api.js";
import { untilReachable } from "./connection.js";
import { make, sleep } from "./dom.js";

/** Pauses before an image is tried again, in ms: the first, and the longest. */
const [PAUSE, LONGEST] = [400, 30_000];
/** Silence after which the server is asked for a sign of life, in ms. */
const PATIENCE = 5000;
/** How often an image is tried again that the server has. */
const ATTEMPTS = 4;
/** What an element shows. */
const sources = new WeakMap();

/**
 * Shows an image in an element. `gone` is called if the server does not have it; all other errors, such as a server that is
 * too busy, a session that has ended or a lost connection, may pass.
 */
export function showImage(element, src, gone = () => {}) {
  let [pause, attempts] = [PAUSE, 0];
  sources.set(element, src);
  const isWanted = () => element.isConnected && sources.get(element) === src;
  // The page has previews itself.
  element.onerror = src.startsWith("data:") ? null : async () => {
    while (isWanted() && attempts < ATTEMPTS) {
      await sleep(pause);
      pause = Math.min(2 * pause, LONGEST);
      try {
        await call(src, { method: "HEAD" });
        attempts += 1;
        if (isWanted()) element.src = src;
        return;
      } catch (error) {
        if (error.status === 404 && isWanted()) return void gone();
      }
    }
  };
  element.src = src;
  // A lazy image may not have been asked for yet.
  if (src.startsWith("data:") || element.loading === "lazy") return;
  const timer = setTimeout(untilReachable, PATIENCE);
  for (const name of ["load", "error"]) element.addEventListener(name, () => clearTimeout(timer), { once: true });
}

/** An image element. */
export function makeImage(src, properties = {}, gone = undefined) {
  const image = make("img", properties);
  showImage(image, src, gone);
  return image;
}

/** Loads an image; throws an error with a status if the server refuses it. */
export async function loadImage(src) {
  const url = URL.createObjectURL(await call(src, { read: "blob" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    return image;
  } finally {
    URL.revokeObjectURL(url);
  }
}
