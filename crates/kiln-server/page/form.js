// The form: the settings of a request.

import { call } from "./api.js";
import * as advanced from "./advanced.js";
import { $, button, make, memory } from "./dom.js";

const SHAPES = [["Square", 1, 1], ["Portrait", 3, 4], ["Tall", 9, 16], ["Landscape", 4, 3], ["Wide", 16, 9]];

let models = [];
let about = { side: 4096, pixels: 4194304, steps: 200, pictures: 10 };
const loras = new Map();

export const model = () => models.find((m) => m.id === $("model").value) ?? models[0];

/** Fetches models, limits and LoRAs, and sets up the form. */
export async function prepare() {
  const [list, limits, names] = await Promise.all([call("/v1/models"), call("/v1/about"), call("/v1/loras")]);
  await advanced.prepare(limits);
  models = list.data;
  about = limits;
  const saved = memory.get("form") ?? {};
  $("model").replaceChildren(...models.map((m) => make("option", { value: m.id, textContent: m.id })));
  $("model").value = models.some((m) => m.id === saved.model) ? saved.model : models.find((m) => m.kiln.default)?.id ?? "";
  $("prompt").maxLength = $("negative").maxLength = about.prompt;
  $("lora-choice").replaceChildren(...names.data.map((name) => make("option", { value: name, textContent: name })));
  $("loras-field").hidden = names.data.length === 0;
  useModel();
  fill(saved);
}

/** Adapts the form to the selected model: its sizes and steps, and whether it has guidance. */
function useModel() {
  const { size, sides, steps, guidance, negative } = model().kiln;
  const maxSide = Math.min(sides?.[1] ?? Math.max(2048, size), about.side);
  for (const side of ["width", "height"]) {
    for (const input of [$(side), $(`${side}-number`)]) {
      input.min = Math.min(sides?.[0] ?? 256, size);
      input.max = input.type === "number" ? about.side : maxSide;
    }
  }
  $("steps").max = Math.min(about.steps, Math.max(50, steps));
  $("steps-number").max = about.steps;
  $("count").max = Math.min(8, about.pictures);
  $("guidance-field").hidden = guidance === null;
  $("negative-field").hidden = !negative;
  set("width", size);
  set("height", size);
  set("steps", steps);
  set("guidance", guidance ?? 1);
  $("presets").replaceChildren(...SHAPES.map(([name, w, h]) => {
    const scale = Math.sqrt((size * size) / (w * h));
    const [width, height] = [w, h].map((side) => Math.round((side * scale) / 16) * 16);
    const chip = button(name, () => {
      set("width", width);
      set("height", height);
      updateSize();
    }, { title: `${width} × ${height}` });
    chip.dataset.size = `${width}x${height}`;
    return chip;
  }));
  updateSize();
}

function set(name, value) {
  $(name).value = value;
  const number = $(`${name}-number`);
  if (number.tagName === "OUTPUT") number.textContent = value;
  else number.value = value;
}

/** Marks the preset in use, and warns about unusual sizes. */
function updateSize() {
  const size = `${$("width-number").value}x${$("height-number").value}`;
  for (const chip of $("presets").children) chip.setAttribute("aria-pressed", chip.dataset.size === size);
  const { sides } = model().kiln;
  const [width, height] = [$("width-number").valueAsNumber, $("height-number").valueAsNumber];
  const untrained = sides && [width, height].some((side) => side < sides[0] || side > sides[1]);
  const tooLarge = width * height > about.pixels;
  $("size-note").hidden = !untrained && !tooLarge;
  $("size-note").textContent = tooLarge
    ? `Too large: the server's limit is ${about.pixels} pixels.`
    : `This model was trained on sides from ${sides?.[0]} to ${sides?.[1]}.`;
}

export function rollSeed() {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0];
}

export function lockSeed(locked = $("lock").getAttribute("aria-pressed") !== "true") {
  $("lock").setAttribute("aria-pressed", locked);
}

function addLora(name, weight = 1) {
  if (!name || loras.has(name)) return;
  loras.set(name, weight);
  const number = make("output", { textContent: weight.toFixed(2) });
  const slider = make("input", { type: "range", min: -2, max: 2, step: 0.05, "aria-label": `Weight of ${name}` });
  slider.value = weight;
  slider.oninput = () => {
    loras.set(name, slider.valueAsNumber);
    number.textContent = slider.valueAsNumber.toFixed(2);
  };
  const row = make("li", {}, make("span", { className: "name", textContent: name, title: name }), slider, number);
  row.append(button("✕", () => {
    loras.delete(name);
    row.remove();
  }, { className: "quiet icon", "aria-label": `Remove ${name}` }));
  $("loras").append(row);
}

/** Fills in a saved form or the values of a request. */
export function fill(values) {
  if (values.model && values.model !== $("model").value && models.some((m) => m.id === values.model)) {
    $("model").value = values.model;
    useModel();
  }
  const take = (name, value) => value !== undefined && value !== null && set(name, value);
  if (values.prompt !== undefined) $("prompt").value = values.prompt;
  $("negative").value = values.negative_prompt ?? "";
  for (const name of ["width", "height", "steps", "guidance"]) take(name, values[name]);
  take("count", values.n);
  if (values.seed !== undefined) $("seed").value = values.seed;
  advanced.fill(values);
  if (values.output_format) $("format").value = values.output_format;
  $("small").checked = values.png === "small";
  if (values.strength !== undefined) {
    $("strength").value = values.strength;
    $("strength-number").textContent = Number(values.strength).toFixed(2);
  }
  loras.clear();
  $("loras").replaceChildren();
  for (const { name, weight } of values.loras ?? []) addLora(name, weight);
  $("small-field").hidden = $("format").value !== "png";
  updateSize();
}

/** The request without its input images, and the seed as typed. Saves the form. */
export function request() {
  if ($("lock").getAttribute("aria-pressed") !== "true" || $("seed").value === "") rollSeed();
  const { guidance, negative } = model().kiln;
  const number = (name) => $(`${name}-number`).valueAsNumber;
  const request = {
    prompt: $("prompt").value,
    model: model().id,
    n: $("count").valueAsNumber,
    width: number("width"),
    height: number("height"),
    steps: number("steps"),
    output_format: $("format").value,
    png: $("small").checked ? "small" : "fast",
    loras: [...loras].map(([name, weight]) => ({ name, weight })),
  };
  if (guidance !== null) request.guidance = number("guidance");
  if (negative && $("negative").value) request.negative_prompt = $("negative").value;
  Object.assign(request, advanced.values());
  memory.set("form", request);
  // JavaScript's numbers are exact up to 2^53; a seed may be larger, so it stays text.
  return { request, seed: $("seed").value };
}

/** The request as JSON, with the exact digits of the seed. */
export function toJson(request, seed) {
  const text = JSON.stringify(request);
  return /^[0-9]+$/.test(seed) ? `${text.slice(0, -1)},"seed":${seed.replace(/^0+(?=.)/, "")}}` : text;
}

export function listen() {
  advanced.listen();
  $("model").onchange = useModel;
  for (const name of ["width", "height", "steps", "guidance", "count"]) {
    const [range, number] = [$(name), $(`${name}-number`)];
    range.oninput = () => {
      set(name, range.value);
      updateSize();
    };
    if (number.tagName === "INPUT") {
      number.oninput = () => {
        range.value = number.value;
        updateSize();
      };
    }
  }
  $("strength").oninput = () => ($("strength-number").textContent = $("strength").valueAsNumber.toFixed(2));
  $("dice").onclick = rollSeed;
  $("lock").onclick = () => lockSeed();
  // Typing a seed locks it.
  $("seed").oninput = () => lockSeed($("seed").value !== "");
  $("format").onchange = () => ($("small-field").hidden = $("format").value !== "png");
  $("lora-add").onclick = () => addLora($("lora-choice").value);
}
