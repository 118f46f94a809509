// The LoRAs of a request and their weights.

import { $, button, make, options } from "./dom.js";

/** Weights by name. */
const chosen = new Map();
/** What the server has: `{ name, triggers, preview }`. */
let known = [];
let insert = () => {};

export const values = () => [...chosen].map(([name, weight]) => ({ name, weight }));

export function prepare(list) {
  known = list;
  $("lora-choice").replaceChildren(...options(known.map(({ name }) => [name, name])));
  $("loras-field").hidden = known.length === 0;
  showChoice();
}

/** Shows the preview and the trigger words of the LoRA that may be added. */
function showChoice() {
  const lora = known.find(({ name }) => name === $("lora-choice").value);
  $("lora-preview").hidden = !lora?.preview;
  if (lora?.preview) $("lora-preview").src = lora.preview;
  $("lora-triggers").hidden = !lora?.triggers.length;
  $("lora-triggers").textContent = `Trigger words: ${lora?.triggers.join(", ")}`;
}

export function fill(list) {
  chosen.clear();
  $("loras").replaceChildren();
  for (const { name, weight } of list ?? []) add(name, weight);
}

/** Adds a LoRA to the request. */
export function use(name) {
  add(name);
  $("loras-field").hidden = false;
}

function add(name, weight = 1) {
  if (!name || chosen.has(name)) return;
  chosen.set(name, weight);
  const number = make("output", { textContent: weight.toFixed(2) });
  const slider = make("input", { type: "range", min: -2, max: 2, step: 0.05, "aria-label": `Weight of ${name}` });
  slider.value = weight;
  slider.oninput = () => {
    chosen.set(name, slider.valueAsNumber);
    number.textContent = slider.valueAsNumber.toFixed(2);
  };
  const row = make("li", {}, make("span", { className: "name", textContent: name, title: name }), slider, number);
  row.append(button("✕", () => {
    chosen.delete(name);
    row.remove();
  }, { className: "quiet icon", "aria-label": `Remove ${name}` }));
  const triggers = known.find((lora) => lora.name === name)?.triggers ?? [];
  if (triggers.length) {
    row.append(make("span", { className: "triggers chips" }, ...triggers.map((word) =>
      button(word, () => insert(word), { title: "Add this trigger word to the prompt" }))));
  }
  $("loras").append(row);
}

/** `insertWord` adds a word to the prompt. */
export function listen(insertWord) {
  insert = insertWord;
  $("lora-choice").onchange = showChoice;
  $("lora-add").onclick = () => add($("lora-choice").value);
}
