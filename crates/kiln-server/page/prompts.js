// Prompt history and styles, saved in this browser.

import { $, button, make, memory, openDialog, options } from "./dom.js";
import { note } from "./notices.js";

const HISTORY_LIMIT = 200;
/** Styles until the user changes them. `{prompt}` is the place of the prompt. */
const DEFAULT_STYLES = {
  Photo: "{prompt}, photograph, natural light, 50 mm lens, shallow depth of field",
  "Ink drawing": "ink drawing of {prompt}, fine lines, white paper",
  Watercolour: "watercolour painting of {prompt}, soft washes, textured paper",
  "3D render": "{prompt}, 3D render, soft studio light, clay material",
  Poster: "minimal flat poster of {prompt}, two colours, bold shapes",
};

let styles = {};
/** The place in the history while it is walked through, and the prompt that was typed before. */
let walk = { index: -1, typed: "" };

const history = () => memory.get("history") ?? [];

/** Adds a prompt to the history. */
export function remember(prompt) {
  if (!prompt.trim()) return;
  memory.set("history", [prompt, ...history().filter((other) => other !== prompt)].slice(0, HISTORY_LIMIT));
  walk = { index: -1, typed: "" };
}

/** The prompt with the chosen style. */
export function styled(prompt) {
  const style = styles[$("style").value];
  if (!style) return prompt;
  return style.includes("{prompt}") ? style.replaceAll("{prompt}", () => prompt) : `${prompt}, ${style}`;
}

/** Adds a word to the end of the prompt. */
export function insertWord(word) {
  const prompt = $("prompt").value.trimEnd();
  if (prompt.split(/\s*,\s*/).includes(word)) return;
  $("prompt").value = prompt ? `${prompt}${prompt.endsWith(",") ? "" : ","} ${word}` : word;
}

/** Walks through the history: 1 to older prompts, -1 back to newer ones. */
function step(by) {
  const list = history();
  if (walk.index === -1) walk.typed = $("prompt").value;
  const index = Math.min(list.length - 1, Math.max(-1, walk.index + by));
  if (index === walk.index) return;
  walk.index = index;
  $("prompt").value = index === -1 ? walk.typed : list[index];
}

function showHistory() {
  const words = $("history-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = history().filter((prompt) => words.every((word) => prompt.toLowerCase().includes(word)));
  $("history-list").replaceChildren(...found.map((prompt) => make("li", {},
    button(prompt, () => {
      $("prompt").value = prompt;
      $("history").close();
      $("prompt").focus();
    }, { className: "entry" }),
    button("✕", () => {
      memory.set("history", history().filter((other) => other !== prompt));
      showHistory();
    }, { className: "quiet icon", "aria-label": `Forget: ${prompt}` }))));
  $("history-empty").hidden = found.length > 0;
}

function showStyles(selected) {
  $("style").replaceChildren(...options([["", "No style"], ...Object.keys(styles).map((name) => [name, name])]));
  $("style").value = selected in styles ? selected : "";
  memory.set("style", $("style").value);
}

function editStyle() {
  const name = $("style").value;
  $("style-name").value = name;
  $("style-text").value = styles[name] ?? "{prompt}, ";
  $("style-delete").hidden = !name;
  openDialog($("style-dialog"));
}

function saveStyle(event) {
  event.preventDefault();
  const [name, old] = [$("style-name").value.trim(), $("style").value];
  if (!name) return;
  if (old) delete styles[old];
  styles[name] = $("style-text").value;
  memory.set("styles", styles);
  showStyles(name);
  $("style-dialog").close();
}

function deleteStyle() {
  const [name, text] = [$("style").value, styles[$("style").value]];
  delete styles[name];
  memory.set("styles", styles);
  showStyles("");
  $("style-dialog").close();
  note(`The style “${name}” is deleted.`, "Undo", () => {
    styles[name] = text;
    memory.set("styles", styles);
    showStyles(name);
  });
}

export function listen() {
  styles = memory.get("styles") ?? { ...DEFAULT_STYLES };
  showStyles(memory.get("style") ?? "");
  $("style").onchange = () => memory.set("style", $("style").value);
  $("style-edit").onclick = editStyle;
  $("style-form").onsubmit = saveStyle;
  $("style-delete").onclick = deleteStyle;
  $("history-open").onclick = () => {
    $("history-search").value = "";
    showHistory();
    openDialog($("history"));
  };
  $("history-search").oninput = showHistory;
  $("prompt").addEventListener("keydown", (event) => {
    if (!event.altKey || (event.key !== "ArrowUp" && event.key !== "ArrowDown")) return;
    event.preventDefault();
    step(event.key === "ArrowUp" ? 1 : -1);
  });
}
