// The mask editor: paint over the area to change.

import { $, make, openDialog } from "./dom.js";
import { loadImage } from "./image.js";

const COLOUR = "rgba(20, 110, 255, 0.6)";
/** Longest side of a mask in pixels; more gains nothing. */
const LONGEST = 1536;
const UNDO_LIMIT = 30;
const MAX_ZOOM = 8;

/** Draws a mask in the overlay colour. */
export function drawMask(canvas, mask) {
  [canvas.width, canvas.height] = [mask.width, mask.height];
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(mask, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = COLOUR;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "source-over";
}

/** The mask with soft edges, this many pixels wide. */
export function feathered(mask, width) {
  if (!width) return mask;
  const soft = make("canvas", { width: mask.width, height: mask.height });
  const context = soft.getContext("2d");
  context.filter = `blur(${width / 2}px)`;
  context.drawImage(mask, 0, 0);
  return soft;
}

/** The mask as a black and white PNG. */
export function toBlob(mask) {
  const flat = make("canvas", { width: mask.width, height: mask.height });
  const context = flat.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, flat.width, flat.height);
  context.drawImage(mask, 0, 0);
  return new Promise((resolve) => flat.toBlob(resolve, "image/png"));
}

/** A mask from a black and white image. */
export async function loadMask(url) {
  const image = await loadImage(url);
  const mask = make("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  const context = mask.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, mask.width, mask.height);
  // The brush works on opaque white over transparency.
  for (let i = 0; i < pixels.data.length; i += 4) pixels.data.set([255, 255, 255, pixels.data[i]], i);
  context.putImageData(pixels, 0, 0);
  return mask;
}

/** Undo and redo of a canvas. */
class History {
  undone = [];
  done = [];

  constructor(context) {
    this.context = context;
  }

  get pixels() {
    const { width, height } = this.context.canvas;
    return this.context.getImageData(0, 0, width, height);
  }

  /** Saves the canvas before a change. */
  save() {
    this.done.push(this.pixels);
    if (this.done.length > UNDO_LIMIT) this.done.shift();
    this.undone = [];
    this.show();
  }

  step(from, to) {
    const pixels = from.pop();
    if (!pixels) return;
    to.push(this.pixels);
    this.context.putImageData(pixels, 0, 0);
    this.show();
  }

  undo = () => this.step(this.done, this.undone);
  redo = () => this.step(this.undone, this.done);

  show() {
    [$("mask-undo").disabled, $("mask-redo").disabled] = [!this.done.length, !this.undone.length];
  }
}

/** Opens the editor. Returns the mask as a canvas, `null` if it is empty, or `undefined` if the editor was closed. */
export async function paintMask(url, previous) {
  const image = await loadImage(url);
  const scale = Math.min(1, LONGEST / Math.max(image.naturalWidth, image.naturalHeight));
  const [width, height] = [image.naturalWidth, image.naturalHeight].map((side) => Math.max(1, Math.round(side * scale)));
  const [board, frame] = [$("mask-board"), $("mask-frame")];
  [board.width, board.height] = [width, height];
  const mask = make("canvas", { width, height });
  const paint = mask.getContext("2d", { willReadFrequently: true });
  if (previous) paint.drawImage(previous, 0, 0, width, height);
  const overlay = make("canvas");
  const history = new History(paint);
  let tool = "brush";
  let last = null;
  let cursor = { x: width / 2, y: height / 2 };
  let zoom = 1;

  const radius = () => ($("brush-size").valueAsNumber * width) / (board.clientWidth || width) / 2;
  const show = (pointer) => {
    drawMask(overlay, mask);
    const context = board.getContext("2d");
    context.drawImage(image, 0, 0, width, height);
    context.drawImage(overlay, 0, 0);
    if (!pointer || tool === "move") return;
    context.lineWidth = Math.max(1, width / 400);
    for (const [colour, extra] of [["#000", context.lineWidth], ["#fff", 0]]) {
      context.strokeStyle = colour;
      context.beginPath();
      context.arc(pointer.x, pointer.y, radius() + extra, 0, 2 * Math.PI);
      context.stroke();
    }
  };
  const setZoom = (value) => {
    const [x, y] = [(frame.scrollLeft + frame.clientWidth / 2) / zoom, (frame.scrollTop + frame.clientHeight / 2) / zoom];
    zoom = Math.min(MAX_ZOOM, Math.max(1, value));
    // Enlarge small images.
    board.style.width = `calc(${zoom} * min(100%, 58vh * ${width / height}))`;
    frame.scrollTo(x * zoom - frame.clientWidth / 2, y * zoom - frame.clientHeight / 2);
    $("mask-zoom").textContent = `${Math.round(100 * zoom)} %`;
    show();
  };
  const stroke = (from, to) => {
    paint.globalCompositeOperation = tool === "eraser" ? "destination-out" : "source-over";
    [paint.strokeStyle, paint.lineCap, paint.lineWidth] = ["#fff", "round", radius() * 2];
    paint.beginPath();
    paint.moveTo(from.x, from.y);
    paint.lineTo(to.x + 0.01, to.y);
    paint.stroke();
    paint.globalCompositeOperation = "source-over";
  };
  const position = (event) => {
    const box = board.getBoundingClientRect();
    return { x: ((event.clientX - box.left) * width) / box.width, y: ((event.clientY - box.top) * height) / box.height };
  };
  const selectTool = (name) => {
    tool = name;
    for (const id of ["brush", "eraser", "move"]) $(`mask-${id}`).setAttribute("aria-pressed", id === name);
    board.style.cursor = name === "move" ? "grab" : "crosshair";
  };
  const edit = (action) => () => {
    history.save();
    action();
    show();
  };

  board.onpointerdown = (event) => {
    board.setPointerCapture(event.pointerId);
    last = position(event);
    if (tool === "move") return;
    history.save();
    stroke(last, last);
    show(last);
  };
  board.onpointermove = (event) => {
    if (tool === "move") return void (last && frame.scrollBy(-event.movementX, -event.movementY));
    const here = (cursor = position(event));
    if (last) {
      stroke(last, here);
      last = here;
    }
    show(here);
  };
  board.onpointerup = board.onpointercancel = () => (last = null);
  board.onpointerleave = () => show();
  frame.onwheel = (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    setZoom(zoom * Math.exp(-event.deltaY / 300));
  };
  board.onkeydown = (event) => {
    const step = Math.max(4, radius() / 2);
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in moves) {
      cursor = { x: cursor.x + moves[event.key][0], y: cursor.y + moves[event.key][1] };
    } else if (event.key === " ") {
      history.save();
      stroke(cursor, cursor);
    } else {
      return;
    }
    event.preventDefault();
    show(cursor);
  };
  for (const id of ["brush", "eraser", "move"]) $(`mask-${id}`).onclick = () => selectTool(id);
  for (const id of ["undo", "redo"]) $(`mask-${id}`).onclick = () => show(history[id]());
  $("mask-in").onclick = () => setZoom(zoom * 1.5);
  $("mask-out").onclick = () => setZoom(zoom / 1.5);
  $("mask-clear").onclick = edit(() => paint.clearRect(0, 0, width, height));
  $("mask-invert").onclick = edit(() => {
    paint.globalCompositeOperation = "xor";
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, width, height);
    paint.globalCompositeOperation = "source-over";
  });
  selectTool("brush");
  history.show();

  const dialog = $("mask-dialog");
  dialog.onkeydown = (event) => {
    const key = event.key.toLowerCase();
    if (key === "[" || key === "]") $("brush-size").valueAsNumber += key === "[" ? -8 : 8;
    if (key === "+" || key === "-") setZoom(key === "+" ? zoom * 1.5 : zoom / 1.5);
    if (!event.ctrlKey && !event.metaKey) return;
    if (key === "y" || (key === "z" && event.shiftKey)) $("mask-redo").click();
    else if (key === "z") $("mask-undo").click();
  };
  return new Promise((resolve) => {
    let painted;
    $("mask-done").onclick = () => {
      const { data } = history.pixels;
      painted = data.some((value, i) => i % 4 === 3 && value > 127) ? mask : null;
      dialog.close();
    };
    dialog.onclose = () => resolve(painted);
    openDialog(dialog);
    setZoom(1);
    board.focus();
  });
}
