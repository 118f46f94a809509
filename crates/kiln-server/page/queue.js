// This client's queued jobs: reorder and cancel.

import { $, button, make, setText } from "./dom.js";
import * as jobs from "./jobs.js";
import { exclusive, trying } from "./notices.js";
import { describe, prompts } from "./stage.js";

/** Rows by job. */
const rows = new Map();
let dragged = null;

const waiting = () => jobs.all().filter((view) => view !== jobs.current());

const queued = () => waiting().filter((view) => view.status === "queued").map((view) => view.id);

/** Moves a queued job by a number of places, to the other side of the job that is shown there. */
function move(id, places) {
  const ids = queued();
  const index = ids.indexOf(id);
  const target = Math.min(ids.length - 1, Math.max(0, index + places));
  if (index < 0 || target === index) return;
  const neighbour = ids[target];
  trying(async () => {
    await jobs.reorder(() => {
      const now = queued().filter((other) => other !== id);
      const place = now.indexOf(neighbour);
      if (place < 0 || now.length === queued().length) return null;
      now.splice(target > index ? place + 1 : place, 0, id);
      return now;
    });
    // The row was moved, which takes the focus away.
    rows.get(id)?.querySelector(places < 0 ? ".up" : ".down").focus();
  });
}

/** The row of a queued job: created once, then updated. A button that is replaced under the pointer can't be pressed. */
function row(view) {
  if (!rows.has(view.id)) rows.set(view.id, create(view));
  const item = rows.get(view.id);
  setText(item.querySelector(".note"), describe(view));
  for (const arrow of item.querySelectorAll(".up, .down")) arrow.hidden = view.status !== "queued";
  return item;
}

function create({ id, request }) {
  const text = prompts({ request });
  const tool = (label, name, className, act) => button(label, act, { className: `quiet icon ${className}`, "aria-label": `${name}: ${text}`, title: name });
  const item = make("li", { draggable: true },
    make("span", { className: "prompt", textContent: text, title: text }),
    make("span", { className: "note" }),
    tool("↑", "Earlier", "up", () => move(id, -1)),
    tool("↓", "Later", "down", () => move(id, 1)),
    tool("✕", "Cancel", "remove", exclusive(() => jobs.cancel(id))));
  item.ondragstart = (event) => {
    dragged = id;
    event.dataTransfer.setData("text/plain", text);
  };
  item.ondragend = () => (dragged = null);
  item.ondragover = (event) => dragged !== null && event.preventDefault();
  item.ondrop = (event) => {
    if (dragged === null) return;
    event.preventDefault();
    event.stopPropagation();
    const ids = waiting().map((view) => view.id);
    move(dragged, ids.indexOf(id) - ids.indexOf(dragged));
  };
  return item;
}

export function show() {
  const shown = waiting().map(row);
  const children = $("queue").children;
  if (shown.length !== children.length || shown.some((item, i) => item !== children[i])) $("queue").replaceChildren(...shown);
  for (const id of rows.keys()) if (!jobs.all().some((view) => view.id === id)) rows.delete(id);
  const number = jobs.all().length;
  setText($("queue-status"), number > 1 ? `${number} jobs` : "");
  $("cancel-all").hidden = number < 2;
}

export function listen() {
  $("cancel-all").onclick = exclusive(jobs.cancelAll);
}
