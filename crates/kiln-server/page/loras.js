// The LoRAs of a request and their weights.

import { call } from "./api.js";
import { $, button, make, options, whenReleased } from "./dom.js";
import { note } from "./notices.js";
import { showImage } from "./image.js";

/** Weights by name. */
const chosen = new Map();
/** What the server has: `{ name, triggers, preview, file, deletable }`. */
let known = [];
let insert = () => {};
let reload = async () => {};

export const values = () => [...chosen].map(([name, weight]) => ({ name, weight }));

/** What is known about a LoRA; nothing if the server does not have it. */
export const find = (name) => known.find((lora) => lora.name === name);

export function prepare(list) {
  const selected = $("lora-choice").value;
  known = list;
  $("lora-choice").replaceChildren(...options(known.map(({ name }) => [name, name])));
  if (find(selected)) $("lora-choice").value = selected;
  $("loras-field").hidden = known.length === 0 && chosen.size === 0;
  showChoice();
}

/** Shows the preview and the trigger words of the LoRA that may be added, and offers its file. */
function showChoice() {
  const lora = find($("lora-choice").value);
  showTools(lora, $("lora-download"), $("lora-delete"));
  $("lora-preview").hidden = !lora?.preview;
  if (lora?.preview) showImage($("lora-preview"), lora.preview);
  $("lora-triggers").hidden = !lora?.triggers.length;
  $("lora-triggers").textContent = `Trigger words: ${lora?.triggers.join(", ")}`;
}

/** Offers the file of a LoRA, and to delete it, if the server does. */
export function showTools(lora, download, remove) {
  download.hidden = !lora?.file;
  if (lora?.file) download.href = lora.file;
  remove.hidden = !lora?.deletable;
}

/** Deletes a LoRA on the server, after a question. */
export function askToDelete(name) {
  note(`Delete the LoRA “${name}” on the server? It can't be restored.`, "Delete", async () => {
    try {
      await call(`/v1/loras/${encodeURIComponent(name)}`, { method: "DELETE" });
    } catch (error) {
      // It was deleted elsewhere.
      if (error.status !== 404) throw error;
    }
    chosen.delete(name);
    [...$("loras").children].find((row) => row.dataset.lora === name)?.remove();
    await reload();
    note(`The LoRA “${name}” is deleted.`);
  });
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
  row.dataset.lora = name;
  row.append(button("✕", () => {
    chosen.delete(name);
    row.remove();
  }, { className: "quiet icon", "aria-label": `Remove ${name}` }));
  const triggers = find(name)?.triggers ?? [];
  if (triggers.length) {
    row.append(make("span", { className: "triggers chips" }, ...triggers.map((word) =>
      button(word, () => insert(word), { title: "Add this trigger word to the prompt" }))));
  }
  $("loras").append(row);
}

/** `insertWord` adds a word to the prompt, `reloadList` fetches what the server has. */
export function listen(insertWord, reloadList) {
  [insert, reload] = [insertWord, reloadList];
  $("lora-choice").onchange = () => whenReleased(showChoice);
  $("lora-delete").onclick = () => askToDelete($("lora-choice").value);
  $("lora-add").onclick = () => add($("lora-choice").value);
}
