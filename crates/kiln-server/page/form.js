// The form: the settings of a request.

import { call } from "./api.js";
import * as advanced from "./advanced.js";
import { $, memory, options } from "./dom.js";
import * as loras from "./loras.js";
import * as seed from "./seed.js";
import * as size from "./size.js";

let models = [];
let about = { side: 4096, pixels: 4194304, steps: 200, images: 10 };

export const model = () => models.find((m) => m.id === $("model").value) ?? models[0];
export const limits = () => about;

/** Fetches models, limits and LoRAs, and sets up the form. */
export async function prepare() {
  const [list, about_, names] = await Promise.all([call("/v1/models"), call("/v1/about"), call("/v1/loras/details")]);
  about = about_;
  await advanced.prepare(about);
  loras.prepare(names.data);
  setModels(list.data);
  $("prompt").maxLength = $("negative").maxLength = about.prompt;
  const saved = memory.get("form") ?? {};
  // The server may have taken its time.
  const typed = $("prompt").value;
  selectModel(saved.model ?? models.find((m) => m.kiln.default)?.id);
  fill(saved);
  if (typed) $("prompt").value = typed;
  $("generate").disabled = false;
}

/** Fetches the models again: one may have been downloaded. */
export async function reloadModels() {
  setModels((await call("/v1/models")).data);
}

/** Fetches the LoRAs again: one may have been trained. */
export async function reloadLoras() {
  loras.prepare((await call("/v1/loras/details")).data);
}

function setModels(list) {
  const selected = $("model").value;
  models = list;
  $("model").replaceChildren(...options(models.map(({ id }) => [id, id])));
  if (models.some(({ id }) => id === selected)) $("model").value = selected;
}

/** Selects a model, if the server has it. */
export function selectModel(id) {
  if (models.some((m) => m.id === id)) $("model").value = id;
  useModel();
}

/** Adapts the form to the selected model: its sizes and steps, and whether it has guidance. */
function useModel() {
  const { steps, guidance, negative, rewrites } = model().kiln;
  size.useModel(model().kiln, about);
  $("steps").max = Math.min(about.steps, Math.max(50, steps));
  $("steps-number").max = about.steps;
  $("count").max = Math.min(8, about.images);
  $("guidance-field").hidden = guidance === null;
  $("negative-field").hidden = !negative;
  $("rewrite").hidden = !rewrites;
  advanced.useModel(model().kiln);
  set("steps", steps);
  set("guidance", guidance ?? 1);
}

function set(name, value) {
  $(name).value = value;
  const number = $(`${name}-number`);
  if (number.tagName === "OUTPUT") number.textContent = value;
  else number.value = value;
}

/** Fills in a saved form or the values of a request. */
export function fill(values) {
  if (values.model && values.model !== $("model").value) selectModel(values.model);
  const take = (name, value) => value !== undefined && value !== null && set(name, value);
  if (values.prompt !== undefined) $("prompt").value = values.prompt;
  $("negative").value = values.negative_prompt ?? "";
  size.set(values.width, values.height);
  for (const name of ["steps", "guidance"]) take(name, values[name]);
  take("count", values.n);
  if (values.seed !== undefined) seed.fill(values.seed);
  advanced.fill(values);
  if (values.output_format) $("format").value = values.output_format;
  $("small").checked = values.png === "small";
  if (values.strength !== undefined) {
    $("strength").value = values.strength;
    $("strength-number").textContent = Number(values.strength).toFixed(2);
  }
  loras.fill(values.loras);
  $("small-field").hidden = $("format").value !== "png";
  // A field that this model does not have is not sent; an invalid one could not be shown, and would block the form.
  for (const field of $("form").querySelectorAll("[hidden] :invalid")) field.value = field.defaultValue;
}

/** The request without its prompt's style, its input images and its seed. Saves the form. */
export function request() {
  const { guidance, negative } = model().kiln;
  const number = (name) => $(`${name}-number`).valueAsNumber;
  const request = {
    prompt: $("prompt").value,
    model: model().id,
    n: $("count").valueAsNumber,
    ...size.values(),
    steps: number("steps"),
    output_format: $("format").value,
    png: $("small").checked ? "small" : "fast",
    loras: loras.values(),
  };
  if (guidance !== null) request.guidance = number("guidance");
  if (negative && $("negative").value) request.negative_prompt = $("negative").value;
  Object.assign(request, advanced.values());
  memory.set("form", request);
  return request;
}

/** Saves what is being typed, for a reload. */
function saveTyped() {
  memory.set("form", { ...memory.get("form"), prompt: $("prompt").value, negative_prompt: $("negative").value || undefined });
}

/** Checks the form, and shows the first field that is wrong. */
export function isValid() {
  const wrong = $("form").querySelector(":invalid:not(fieldset)");
  // A closed section can't show its field.
  wrong?.closest("details")?.setAttribute("open", "");
  return $("form").reportValidity();
}

export function listen() {
  advanced.listen();
  size.listen();
  seed.listen();
  $("model").onchange = useModel;
  for (const id of ["prompt", "negative"]) $(id).addEventListener("input", saveTyped);
  for (const name of ["steps", "guidance", "count"]) {
    const [range, number] = [$(name), $(`${name}-number`)];
    range.oninput = () => set(name, range.value);
    if (number.tagName === "INPUT") number.oninput = () => (range.value = number.value);
  }
  $("strength").oninput = () => ($("strength-number").textContent = $("strength").valueAsNumber.toFixed(2));
  $("format").onchange = () => ($("small-field").hidden = $("format").value !== "png");
}
