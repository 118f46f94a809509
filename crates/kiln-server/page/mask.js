// The mask editor: paint over the area to change.

import { $, make } from "./dom.js";

const COLOUR = "rgba(20, 110, 255, 0.6)";
/** Longest side of a mask in pixels; more gains nothing. */
const LONGEST = 1536;
const UNDO_LIMIT = 30;

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

/** Opens the editor. Returns the mask as a canvas, `null` if it is empty, or `undefined` if the editor was closed. */
export async function paintMask(url, previous) {
  const image = new Image();
  image.src = url;
  await image.decode();
  const scale = Math.min(1, LONGEST / Math.max(image.naturalWidth, image.naturalHeight));
  const [width, height] = [image.naturalWidth, image.naturalHeight].map((side) => Math.max(1, Math.round(side * scale)));
  const board = $("mask-board");
  [board.width, board.height] = [width, height];
  // Enlarge small images.
  board.style.width = `min(100%, calc(62vh * ${width / height}))`;
  const mask = make("canvas", { width, height });
  const paint = mask.getContext("2d", { willReadFrequently: true });
  if (previous) paint.drawImage(previous, 0, 0, width, height);
  const overlay = make("canvas");
  const history = [];
  let erasing = false;
  let last = null;
  let cursor = { x: width / 2, y: height / 2 };

  const radius = () => ($("brush-size").valueAsNumber * width) / (board.clientWidth || width) / 2;
  const show = (pointer) => {
    drawMask(overlay, mask);
    const context = board.getContext("2d");
    context.drawImage(image, 0, 0, width, height);
    context.drawImage(overlay, 0, 0);
    if (pointer) {
      context.beginPath();
      context.arc(pointer.x, pointer.y, radius(), 0, 7);
      context.lineWidth = Math.max(1, width / 400);
      context.strokeStyle = "#fff";
      context.stroke();
    }
  };
  const saveUndo = () => {
    history.push(paint.getImageData(0, 0, width, height));
    if (history.length > UNDO_LIMIT) history.shift();
  };
  const stroke = (from, to) => {
    paint.globalCompositeOperation = erasing ? "destination-out" : "source-over";
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
  const selectTool = (eraser) => {
    erasing = eraser;
    $("brush").setAttribute("aria-pressed", !eraser);
    $("eraser").setAttribute("aria-pressed", eraser);
  };
  const edit = (action) => () => {
    saveUndo();
    action();
    show();
  };

  board.onpointerdown = (event) => {
    board.setPointerCapture(event.pointerId);
    saveUndo();
    last = position(event);
    stroke(last, last);
    show(last);
  };
  board.onpointermove = (event) => {
    const here = (cursor = position(event));
    if (last) {
      stroke(last, here);
      last = here;
    }
    show(here);
  };
  board.onpointerup = board.onpointercancel = () => (last = null);
  board.onpointerleave = () => show();
  board.onkeydown = (event) => {
    const step = Math.max(4, radius() / 2);
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in moves) {
      cursor = { x: cursor.x + moves[event.key][0], y: cursor.y + moves[event.key][1] };
    } else if (event.key === " ") {
      saveUndo();
      stroke(cursor, cursor);
    } else {
      return;
    }
    event.preventDefault();
    show(cursor);
  };
  $("brush").onclick = () => selectTool(false);
  $("eraser").onclick = () => selectTool(true);
  $("mask-undo").onclick = () => {
    const before = history.pop();
    if (before) paint.putImageData(before, 0, 0);
    show();
  };
  $("mask-clear").onclick = edit(() => paint.clearRect(0, 0, width, height));
  $("mask-invert").onclick = edit(() => {
    paint.globalCompositeOperation = "xor";
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, width, height);
    paint.globalCompositeOperation = "source-over";
  });
  selectTool(false);
  show();

  const dialog = $("mask-dialog");
  dialog.onkeydown = (event) => {
    if (event.key === "[" || event.key === "]") $("brush-size").valueAsNumber += event.key === "[" ? -8 : 8;
    if (event.key === "z" && (event.ctrlKey || event.metaKey)) $("mask-undo").click();
  };
  return new Promise((resolve) => {
    let painted;
    $("mask-done").onclick = () => {
      const { data } = paint.getImageData(0, 0, width, height);
      painted = data.some((value, i) => i % 4 === 3 && value > 127) ? mask : null;
      dialog.close();
    };
    dialog.onclose = () => resolve(painted);
    dialog.showModal();
    board.focus();
  });
}
