// Keyboard shortcuts.

import { $, isDialogOpen, isField } from "./dom.js";
import { takeAction } from "./notices.js";

/** `actions` by key; `cancel` and `submit` for Escape and Ctrl+Enter. */
export function listen({ actions, cancel, submit }) {
  document.addEventListener("keydown", (event) => {
    const control = event.ctrlKey || event.metaKey;
    if (event.key === "Enter" && control) {
      event.preventDefault();
      if (!isDialogOpen()) submit();
      return;
    }
    const inField = isField(event.target);
    // In a field, Ctrl+Z undoes the typing; in the mask's editor, a stroke.
    if (event.key === "z" && control && !event.shiftKey && !inField && !$("mask-dialog").open && takeAction()) {
      event.preventDefault();
      return;
    }
    if (isDialogOpen() || event.defaultPrevented) return;
    // In a field, Escape closes its suggestions or leaves it: it must not cost anybody a job.
    if (event.key === "Escape") {
      if (inField) event.target.blur();
      else cancel();
      return;
    }
    if (inField || control || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}
