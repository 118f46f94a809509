// The form: what to generate and how, as a request for the server.

import { call } from "./api.js";
import * as advanced from "./advanced.js";
import { $, button, make, memory } from "./dom.js";

const SHAPES = [["Square", 1, 1], ["Portrait", 3, 4], ["Tall", 9, 16], ["Landscape", 4, 3], ["Wide", 16, 9]];

let models = [];
let about = { side: 4096, pixels: 4194304, steps: 200, pictures: 10 };
const loras = new Map();

export const model = () => models.find((m) => m.id === $("model").value) ?? models[0];

/** Fetches what can be asked for, and sets the form up for it. */
export async function prepare() {
  const [list, limits, names] = await Promise.all([call("/v1/models"), call("/v1/about"), call("/v1/loras")]);
  await advanced.prepare(limits);
  models = list.data;
  about = limits;
  const kept = memory.get("form") ?? {};
  $("model").replaceChildren(...models.map((m) => make("option", { value: m.id, textContent: m.id })));
  $("model").value = models.some((m) => m.id === kept.model) ? kept.model : models.find((m) => m.kiln.default)?.id ?? "";
  $("prompt").maxLength = $("negative").maxLength = about.prompt;
  $("lora-choice").replaceChildren(...names.data.map((name) => make("option", { value: name, textContent: name })));
  $("loras-field").hidden = names.data.length === 0;
  useModel();
  fill(kept);
}

/** The form for the chosen model: its sizes, steps, and whether it has guidance. */
function useModel() {
  const { size, sides, steps, guidance, negative } = model().kiln;
  const most = Math.min(sides?.[1] ?? Math.max(2048, size), about.side);
  for (const side of ["width", "height"]) {
    for (const input of [$(side), $(`${side}-number`)]) {
      input.min = Math.min(sides?.[0] ?? 256, size);
      input.max = input.type === "number" ? about.side : most;
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
      sized();
    }, { title: `${width} × ${height}` });
    chip.dataset.size = `${width}x${height}`;
    return chip;
  }));
  sized();
}

function set(name, value) {
  $(name).value = value;
  const number = $(`${name}-number`);
  if (number.tagName === "OUTPUT") number.textContent = value;
  else number.value = value;
}

/** Marks the preset in use, and says what an odd size means. */
function sized() {
  const size = `${$("width-number").value}x${$("height-number").value}`;
  for (const chip of $("presets").children) chip.setAttribute("aria-pressed", chip.dataset.size === size);
  const { sides } = model().kiln;
  const [width, height] = [$("width-number").valueAsNumber, $("height-number").valueAsNumber];
  const odd = sides && [width, height].some((side) => side < sides[0] || side > sides[1]);
  const large = width * height > about.pixels;
  $("size-note").hidden = !odd && !large;
  $("size-note").textContent = large
    ? "More pixels than this server paints."
    : `This model knows sides from ${sides?.[0]} to ${sides?.[1]}.`;
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

/** Puts a kept form or a job's values in. */
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
  sized();
}

/** The request, but for its images. */
export function order() {
  if ($("lock").getAttribute("aria-pressed") !== "true" || $("seed").value === "") rollSeed();
  const { guidance, negative } = model().kiln;
  const number = (name) => $(`${name}-number`).valueAsNumber;
  const asked = {
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
  if (guidance !== null) asked.guidance = number("guidance");
  if (negative && $("negative").value) asked.negative_prompt = $("negative").value;
  Object.assign(asked, advanced.values());
  memory.set("form", asked);
  // Numbers in a script are exact up to 2^53; a seed may be larger, so it goes in as it was typed.
  return { asked, seed: $("seed").value };
}

/** The request as JSON, with the seed's digits untouched. */
export function toJson({ asked, seed }) {
  const text = JSON.stringify(asked);
  return /^[0-9]+$/.test(seed) ? `${text.slice(0, -1)},"seed":${seed.replace(/^0+(?=.)/, "")}}` : text;
}

export function listen() {
  advanced.listen();
  $("model").onchange = useModel;
  for (const name of ["width", "height", "steps", "guidance", "count"]) {
    const [range, number] = [$(name), $(`${name}-number`)];
    range.oninput = () => {
      set(name, range.value);
      sized();
    };
    if (number.tagName === "INPUT") {
      number.oninput = () => {
        range.value = number.value;
        sized();
      };
    }
  }
  $("strength").oninput = () => ($("strength-number").textContent = $("strength").valueAsNumber.toFixed(2));
  $("dice").onclick = rollSeed;
  $("lock").onclick = () => lockSeed();
  // Who types a seed wants it.
  $("seed").oninput = () => lockSeed($("seed").value !== "");
  $("format").onchange = () => ($("small-field").hidden = $("format").value !== "png");
  $("lora-add").onclick = () => addLora($("lora-choice").value);
}
