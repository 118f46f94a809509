// The settings of a new training.

import { call, send } from "./api.js";
import { $, make, memory, options, setText, whenReleased } from "./dom.js";
import { trying } from "./notices.js";
import * as fields from "./fields.js";
import * as images from "./train-images.js";

/** Time after the last change before the training is checked, in milliseconds. */
const PAUSE = 700;
const PRESETS = {
  style: "How images look. 15 to 40 images with full captions; a trigger word is not needed.",
  subject: "A person, an animal or an object. 10 to 25 images in many situations; captions name the situation, the trigger word the subject.",
  full: "Anything else: all layers of the model.",
};
const FIELDS = ["train-name", "train-trigger", "train-model", "train-preset", "train-prompts"];
/** The form offers base models only. */
const LEFT_OUT = ["distilled_anyway"];
/** Fields that a preset fills in. */
const SETTINGS = ["train-steps", "train-rank", "train-resolution", "train-rate"];

let models = [];
let timer = null;
/** Counts checks: an answer to an old one is not shown. */
let checks = 0;
let started = () => {};
/** The model and preset whose settings are filled in. */
let filled = null;

const given = () => fields.values($("train-form"));
export const model = (name) => models.find((model) => model.name === name);

/** Fetches the base models, and fills in the form. */
export async function prepare() {
  const [options_, described] = await Promise.all([call("/v1/trainings/options"), fields.describe("TrainRequest")]);
  models = options_.models;
  fields.complete($("train-form"), $("train-more"), described, LEFT_OUT);
  const selected = $("train-model").value || memory.get("train")?.["train-model"];
  $("train-model").replaceChildren(...options(models.map(({ name }) => [name, name])));
  if (models.some(({ name }) => name === selected)) $("train-model").value = selected;
  $("train-none").hidden = models.length > 0;
  $("train-start").disabled = models.length === 0;
  usePreset();
  check();
}

/** Shows the settings that the preset recommends for the model. */
function usePreset() {
  const chosen = model($("train-model").value);
  const settings = chosen?.presets.find(({ preset }) => preset === $("train-preset").value);
  setText($("train-preset-note"), PRESETS[$("train-preset").value]);
  setText($("train-model-note"), chosen?.use_with
    ? `The LoRA is made for ${chosen.use_with}, the fast model. Distilled models such as it can't be trained: their images would turn grey.`
    : "Distilled models are not listed: training undoes their distillation, and their images turn grey.");
  const key = `${chosen?.name} ${$("train-preset").value}`;
  // What the user has changed stays until another preset or model is chosen.
  if (!settings || filled === key) return;
  const own = filled === null ? memory.get("train")?.settings : null;
  filled = key;
  const values = [settings.steps, settings.rank, settings.resolution.join(", "), settings.learning_rate];
  for (const [i, id] of SETTINGS.entries()) $(id).value = own?.key === key ? own[id] : values[i];
}

/** Asks the server what it thinks of the images and what the training costs, a moment after the last change. */
function check() {
  clearTimeout(timer);
  const missing = images.uncaptioned();
  // The trigger word stands in for captions.
  const hasTrigger = $("train-trigger").value.trim() !== "";
  whenReleased(() => ($("train-uncaptioned-field").hidden = !missing || hasTrigger));
  if (!images.count() || !models.length) {
    showCheck("", []);
    return;
  }
  timer = setTimeout(async () => {
    const number = (checks += 1);
    if (images.isUploading() || !$("train").open) return;
    if (images.missing().length) return void showCheck("", [missingNote()], true);
    setText($("train-cost"), "Checking the images…");
    try {
      const request = { name: "untitled", ...given() };
      const found = await send("POST", "/v1/trainings/check", { request, images: images.values() }, { again: true });
      if (number !== checks) return;
      const notes = missing && request.trigger ? [`${missing} without a caption: the trigger word alone is used for them.`] : [];
      showCheck(`${found.examples} ${found.examples === 1 ? "example" : "examples"}: ${found.sizes.join(", ")}. ${found.cost}.`, [...found.warnings, ...notes]);
    } catch (error) {
      if (number === checks) showCheck("", [error.message], true);
    }
  }, PAUSE);
}

function showCheck(cost, warnings, wrong = false) {
  whenReleased(() => {
    setText($("train-cost"), cost);
    $("train-warnings").replaceChildren(...warnings.map((textContent) => make("li", { textContent })));
    $("train-warnings").classList.toggle("wrong", wrong);
  });
}

const missingNote = () => `No longer on the server: ${images.missing().map((name) => `“${name}”`).join(", ")}. Add the files again, or remove them.`;

async function start() {
  if (images.isUploading()) throw new Error("The images are still being uploaded.");
  if (!images.count()) throw new Error("Add images first.");
  if (images.missing().length) throw new Error(missingNote());
  const view = await send("POST", "/v1/trainings", { request: given(), images: images.values() });
  images.clear();
  for (const id of ["train-name", "train-trigger", "train-prompts"]) $(id).value = "";
  save();
  started(view);
}

function save() {
  // Without models there is no choice to save.
  const value = (id) => $(id).value || (id === "train-model" ? memory.get("train")?.[id] : "");
  const settings = filled && { key: filled, ...Object.fromEntries(SETTINGS.map((id) => [id, $(id).value])) };
  memory.set("train", { ...Object.fromEntries(FIELDS.map((id) => [id, value(id)])), settings });
}

/** `onStart` gets a training that was started. */
export function listen(onStart) {
  started = onStart;
  for (const [id, value] of Object.entries(memory.get("train") ?? {})) if (FIELDS.includes(id) && id !== "train-model") $(id).value = value;
  images.listen(check);
  $("train-form").addEventListener("input", save);
  $("train-form").addEventListener("change", (event) => {
    if (event.target.id === "train-model" || event.target.id === "train-preset") usePreset();
    save();
    check();
  });
  let sending = false;
  $("train-form").onsubmit = async (event) => {
    event.preventDefault();
    if (sending) return;
    sending = $("train-start").disabled = true;
    await trying(start);
    sending = $("train-start").disabled = false;
  };
}
