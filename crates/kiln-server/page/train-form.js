// The settings of a new training.

import { call, send } from "./api.js";
import { $, memory, options, setText } from "./dom.js";
import { trying } from "./notices.js";
import * as pictures from "./train-pictures.js";

/** Time after the last change before the training is checked, in milliseconds. */
const PAUSE = 700;
const PRESETS = {
  style: "How pictures look. 15 to 40 pictures with full captions; a trigger word is not needed.",
  subject: "A person, an animal or an object. 10 to 25 pictures in many situations; captions name the situation, the trigger word the subject.",
  full: "Anything else: all layers of the model.",
};
const FIELDS = ["train-name", "train-trigger", "train-model", "train-preset", "train-prompts"];

let models = [];
let timer = null;
/** Counts checks: an answer to an old one is not shown. */
let checks = 0;
let started = () => {};

export const model = (name) => models.find((model) => model.name === name);

/** Fetches the base models, and fills in the form. */
export async function prepare() {
  ({ models } = await call("/v1/trainings/options"));
  const selected = $("train-model").value || memory.get("train")?.["train-model"];
  $("train-model").replaceChildren(...options(models.map(({ name }) => [name, name])));
  if (models.some(({ name }) => name === selected)) $("train-model").value = selected;
  $("train-none").hidden = models.length > 0;
  $("train-start").disabled = models.length === 0;
  usePreset();
}

/** Shows the settings that the preset recommends for the model. */
function usePreset() {
  const chosen = model($("train-model").value);
  const settings = chosen?.presets.find(({ preset }) => preset === $("train-preset").value);
  setText($("train-preset-note"), PRESETS[$("train-preset").value]);
  setText($("train-model-note"), chosen?.use_with
    ? `The LoRA is made for ${chosen.use_with}, the fast model. Distilled models such as it can't be trained: their pictures would turn grey.`
    : "Distilled models are not listed: training undoes their distillation, and their pictures turn grey.");
  if (!settings) return;
  $("train-steps").value = settings.steps;
  $("train-rank").value = settings.rank;
  $("train-resolution").value = settings.resolution.join(", ");
  $("train-rate").value = settings.learning_rate;
  check();
}

function order() {
  const lines = $("train-prompts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  return {
    name: $("train-name").value.trim(),
    model: $("train-model").value || undefined,
    trigger: $("train-trigger").value.trim() || undefined,
    preset: $("train-preset").value,
    steps: $("train-steps").valueAsNumber,
    rank: $("train-rank").valueAsNumber,
    resolution: $("train-resolution").value.split(",").map((side) => Number(side.trim())).filter(Boolean),
    learning_rate: $("train-rate").valueAsNumber,
    flip: $("train-flip").checked,
    sample_prompts: lines,
    skip_bad: $("train-skip").checked,
    no_captions: $("train-uncaptioned").checked,
  };
}

/** Asks the server what it thinks of the pictures and what the training costs, a moment after the last change. */
function check() {
  clearTimeout(timer);
  const missing = pictures.uncaptioned();
  // The trigger word stands in for captions.
  $("train-uncaptioned-field").hidden = !missing || $("train-trigger").value.trim() !== "";
  if (!pictures.count() || !models.length) {
    showCheck("", []);
    return;
  }
  timer = setTimeout(async () => {
    const number = (checks += 1);
    if (pictures.isUploading() || !$("train").open) return;
    setText($("train-cost"), "Checking the pictures…");
    try {
      const order_ = order();
      const found = await send("POST", "/v1/trainings/check", { order: { ...order_, name: order_.name || "untitled" }, pictures: pictures.values() });
      if (number !== checks) return;
      const notes = missing && order_.trigger ? [`${missing} without a caption: the trigger word alone is used for them.`] : [];
      showCheck(`${found.examples} ${found.examples === 1 ? "example" : "examples"}: ${found.sizes.join(", ")}. ${found.cost}.`, [...found.warnings, ...notes]);
    } catch (error) {
      if (number === checks) showCheck("", [error.message], true);
    }
  }, PAUSE);
}

function showCheck(cost, warnings, wrong = false) {
  setText($("train-cost"), cost);
  $("train-warnings").replaceChildren(...warnings.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  $("train-warnings").classList.toggle("wrong", wrong);
}

async function start() {
  if (pictures.isUploading()) throw new Error("The pictures are still being uploaded.");
  if (!pictures.count()) throw new Error("Add pictures first.");
  const view = await send("POST", "/v1/trainings", { order: order(), pictures: pictures.values() });
  pictures.clear();
  for (const id of ["train-name", "train-trigger", "train-prompts"]) $(id).value = "";
  save();
  started(view);
}

function save() {
  memory.set("train", Object.fromEntries(FIELDS.map((id) => [id, $(id).value])));
}

/** `onStart` gets a training that was started. */
export function listen(onStart) {
  started = onStart;
  for (const [id, value] of Object.entries(memory.get("train") ?? {})) if (FIELDS.includes(id) && id !== "train-model") $(id).value = value;
  pictures.listen(check);
  $("train-form").addEventListener("change", (event) => {
    save();
    if (event.target.id === "train-model" || event.target.id === "train-preset") usePreset();
    else check();
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
