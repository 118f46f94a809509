// Rewriting the prompt with a language model; the new one can be edited before it is used.

import { send } from "./api.js";
import { $ } from "./dom.js";
import * as form from "./form.js";
import * as inputs from "./inputs.js";
import { note, trying } from "./notices.js";

/** The longest wait for a new prompt, in milliseconds. */
const LIMIT = 600_000;
/** The prompt before it was rewritten, and the words of what it became; null if it was not. */
let rewritten = null;

const words = (text) => [...new Set(text.toLowerCase().match(/[\p{L}\p{N}]+/gu))];

/** The original of the prompt in the form, if that was rewritten. An edited prompt keeps at least half of the words. */
export function original() {
  if (!rewritten) return undefined;
  const now = new Set(words($("prompt").value));
  const kept = rewritten.words.filter((word) => now.has(word)).length;
  return 2 * kept >= rewritten.words.length && now.size ? rewritten.original : undefined;
}

/** Forgets the original: the form has another prompt. */
export function forget() {
  rewritten = null;
}

async function rewrite() {
  const prompt = $("prompt").value;
  if (!prompt.trim()) return $("prompt").focus();
  const button = $("rewrite");
  button.disabled = true;
  button.textContent = "Rewriting…";
  try {
    const { references = [] } = await inputs.fields();
    const body = { prompt, references, model: form.model().id };
    const answer = await send("POST", "/v1/prompts/upsample", body, { limit: LIMIT });
    const use = () => {
      const before = $("prompt").value;
      rewritten = { original: original() ?? answer.original_prompt, words: words(answer.prompt) };
      $("prompt").value = answer.prompt;
      note("The prompt is rewritten.", "Undo", () => {
        $("prompt").value = before;
        forget();
      });
      $("prompt").focus();
    };
    // What was typed meanwhile is not lost.
    if ($("prompt").value === prompt) use();
    else note("The rewritten prompt is ready. It replaces what you have typed since.", "Use it", use);
  } finally {
    button.disabled = false;
    button.textContent = "Rewrite";
  }
}

export function listen() {
  $("rewrite").onclick = () => trying(rewrite);
}
