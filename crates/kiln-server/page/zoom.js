// Zooming and panning an image: wheel, pinch, double click, drag, keys.

import { setText } from "./dom.js";

const MAX_SCALE = 16;

/** Lets `image`, which fills `frame`, be zoomed. `onChange` gets the zoom in percent of the image's pixels. */
export function zoomable(frame, image, onChange = () => {}) {
  let [scale, x, y] = [1, 0, 0];
  /** Positions of the pressed pointers. */
  const pointers = new Map();

  /** How large the image is shown without zoom, in screen pixels for each of its own. */
  const fit = () => Math.min(frame.clientWidth / image.naturalWidth, frame.clientHeight / image.naturalHeight) || 1;
  const apply = () => {
    // Keep some of it in view.
    const [maxX, maxY] = [(frame.clientWidth * (scale - 1)) / 2, (frame.clientHeight * (scale - 1)) / 2];
    [x, y] = [Math.min(maxX, Math.max(-maxX, x)), Math.min(maxY, Math.max(-maxY, y))];
    image.style.transform = scale === 1 ? "" : `translate(${x}px, ${y}px) scale(${scale})`;
    image.style.imageRendering = scale * fit() >= 3 ? "pixelated" : "";
    frame.classList.toggle("zoomed", scale > 1);
    onChange(Math.round(100 * scale * fit()));
  };
  /** Zooms by a factor around a point of the screen. */
  const zoom = (factor, clientX, clientY) => {
    const box = frame.getBoundingClientRect();
    const [px, py] = [(clientX ?? box.x + box.width / 2) - box.x - box.width / 2, (clientY ?? box.y + box.height / 2) - box.y - box.height / 2];
    const next = Math.min(Math.max(MAX_SCALE, 2 / fit()), Math.max(1, scale * factor));
    [x, y] = [px - ((px - x) * next) / scale, py - ((py - y) * next) / scale];
    scale = next;
    apply();
  };
  const reset = () => {
    [scale, x, y] = [1, 0, 0];
    apply();
  };
  /** Switches between the whole image and its own pixels. */
  const toggle = (clientX, clientY) => (scale > 1 ? reset() : zoom(Math.max(2, 1 / fit()), clientX, clientY));
  const pan = (dx, dy) => {
    [x, y] = [x + dx, y + dy];
    apply();
  };

  frame.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), event.clientX, event.clientY);
  }, { passive: false });
  frame.addEventListener("dblclick", (event) => !event.target.closest("button") && toggle(event.clientX, event.clientY));
  frame.addEventListener("pointerdown", (event) => {
    if (event.target.closest("button, input")) return;
    pointers.set(event.pointerId, event);
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) return pan(event.clientX - before.clientX, event.clientY - before.clientY);
    const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
    const distance = (pointer) => Math.hypot(pointer.clientX - other.clientX, pointer.clientY - other.clientY) || 1;
    zoom(distance(event) / distance(before), (event.clientX + other.clientX) / 2, (event.clientY + other.clientY) / 2);
  });
  for (const name of ["pointerup", "pointercancel"]) frame.addEventListener(name, (event) => pointers.delete(event.pointerId));
  image.draggable = false;
  image.addEventListener("load", reset);

  /** Handles a key; returns whether it did. */
  const key = (name) => {
    const step = 80;
    const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    if (name === "+" || name === "=") zoom(1.5);
    else if (name === "-") zoom(1 / 1.5);
    else if (name === "0") reset();
    else if (name in moves && scale > 1) pan(...moves[name]);
    else return false;
    return true;
  };
  return { key, zoom, reset, toggle };
}

/** Shows the zoom in an element. */
export const percent = (element) => (value) => setText(element, `${value} %`);
