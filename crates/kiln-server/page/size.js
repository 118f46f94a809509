// The size of the image: presets, swap, and the size of the input image.

import { $, button } from "./dom.js";

const SHAPES = [["Square", 1, 1], ["Portrait", 3, 4], ["Tall", 9, 16], ["Landscape", 4, 3], ["Wide", 16, 9]];

let model = { size: 1024, unit: 16, sides: null };
let about = { side: 4096, pixels: 4194304 };
/** The size of the first input image, if there is one. */
let source = null;

const round = (side) => Math.max(model.unit, Math.round(side / model.unit) * model.unit);

export const values = () => ({ width: $("width-number").valueAsNumber, height: $("height-number").valueAsNumber });

export function set(width, height) {
  for (const [name, value] of [["width", width], ["height", height]]) {
    if (value) $(name).value = $(`${name}-number`).value = value;
  }
  update();
}

/** Adapts the limits and presets to a model. */
export function useModel(kiln, limits) {
  [model, about] = [kiln, limits];
  const { size, sides } = model;
  const maxSide = Math.min(sides?.[1] ?? Math.max(2048, size), about.side);
  for (const side of ["width", "height"]) {
    for (const input of [$(side), $(`${side}-number`)]) {
      input.step = model.unit;
      input.min = Math.min(sides?.[0] ?? 256, size);
      input.max = input.type === "number" ? about.side : maxSide;
    }
  }
  $("presets").replaceChildren(...SHAPES.map(([name, w, h]) => {
    const scale = Math.sqrt((size * size) / (w * h));
    const [width, height] = [round(w * scale), round(h * scale)];
    const chip = button(name, () => set(width, height), { title: `${width} × ${height}` });
    chip.dataset.size = `${width}x${height}`;
    return chip;
  }));
  set(size, size);
}

/** The size of an image, within the limits of the server and the model. */
function fitted({ width, height }) {
  const longest = Math.min(model.sides?.[1] ?? about.side, about.side);
  const scale = Math.min(1, longest / Math.max(width, height), Math.sqrt(about.pixels / (width * height)));
  // Down, so that rounding never exceeds a limit.
  return [width, height].map((side) => Math.max(model.unit, Math.floor((side * scale) / model.unit) * model.unit));
}

/** Tells the size of the first input image, or that there is none. */
export function useSource(size) {
  source = size?.width ? size : null;
  $("source-size").hidden = !source;
  if (source) $("source-size").title = fitted(source).join(" × ");
}

/** Marks the preset in use, and warns about unusual sizes. */
function update() {
  const { width, height } = values();
  for (const chip of $("presets").children) chip.setAttribute("aria-pressed", chip.dataset.size === `${width}x${height}`);
  const { sides } = model;
  const untrained = sides && [width, height].some((side) => side < sides[0] || side > sides[1]);
  const tooLarge = width * height > about.pixels;
  $("size-note").hidden = !untrained && !tooLarge;
  $("size-note").textContent = tooLarge
    ? `Too large: the server's limit is ${about.pixels} pixels.`
    : `This model was trained on sides from ${sides?.[0]} to ${sides?.[1]}.`;
}

export function listen() {
  for (const name of ["width", "height"]) {
    const [range, number] = [$(name), $(`${name}-number`)];
    range.oninput = () => {
      number.value = range.value;
      update();
    };
    number.oninput = () => {
      range.value = number.value;
      update();
    };
  }
  $("swap-size").onclick = () => {
    const { width, height } = values();
    set(height, width);
  };
  $("source-size").onclick = () => set(...fitted(source));
}
