// Plots: one request for a grid of images that differ in one or two settings.

import { call, send } from "./api.js";
import { $, button, make, openDialog, options, save, whenReleased } from "./dom.js";
import * as form from "./form.js";
import * as inputs from "./inputs.js";
import * as jobs from "./jobs.js";
import { exclusive, trying } from "./notices.js";
import { loadImage, makeImage } from "./image.js";
import * as prompts from "./prompts.js";
import * as seed from "./seed.js";

/** Settings that an axis can vary: name, label, an example. */
const FIELDS = [["seed", "Seed", "1, 2, 3"], ["steps", "Steps", "2, 4, 8"], ["guidance", "Guidance", "1, 2.5, 4"], ["strength", "Strength", "0.4, 0.6, 0.8"], ["model", "Model", ""], ["prompt", "Prompt, one per line", ""]];
const label = (name) => FIELDS.find(([field]) => field === name)?.[1].split(",")[0] ?? name;
/** Time between two looks at an unfinished plot, in milliseconds. */
const INTERVAL = 1000;
/** Sides of a cell and of the labels in a saved plot. */
const [CELL, LABEL] = [384, 56];

let shown = null;
let timer = null;
let open = () => {};

/** The values of an axis as JSON texts: `1, 3-5` are 1, 3, 4 and 5. Seeds keep all their digits. */
export function parseValues(field, text) {
  if (field === "prompt") return text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => JSON.stringify(line));
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  if (field === "model") return parts.map((part) => JSON.stringify(part));
  return parts.flatMap((part) => {
    const range = part.match(/^(\d{1,15})-(\d{1,15})$/);
    if (range) {
      const [from, to] = [Number(range[1]), Number(range[2])];
      if (to < from || to - from > 99) throw new Error(`“${part}” is not a range of at most 100 values.`);
      return Array.from({ length: to - from + 1 }, (_, i) => String(from + i));
    }
    if (!/^\d+(\.\d+)?$/.test(part)) throw new Error(`“${part}” is not a number: write values such as 1, 2, 3 or a range such as 1-3.`);
    return [part.replace(/^0+(?=\d)/, "")];
  });
}

function axis(id) {
  const field = $(`${id}-field`).value;
  if (!field) return null;
  const values = parseValues(field, $(`${id}-values`).value);
  if (!values.length) throw new Error(`${label(field)} has no values.`);
  return { field, values };
}

/** Updates the number of cells, or says what is wrong. */
function check() {
  for (const id of ["x", "y"]) {
    const field = FIELDS.find(([name]) => name === $(`${id}-field`).value);
    $(`${id}-values`).disabled = !field;
    $(`${id}-values`).placeholder = field?.[2] ?? "";
  }
  let text;
  let count = 0;
  try {
    const [x, y] = [axis("x"), axis("y")];
    if (y && y.field === x.field) throw new Error("Both axes vary the same setting.");
    count = x.values.length * (y?.values.length ?? 1);
    const limit = Math.floor(form.limits().capacity / 2);
    text = count > limit ? `${count} images are too many: the limit is ${limit}.` : `${count} ${count === 1 ? "image" : "images"}`;
    if (count > limit) count = 0;
  } catch (error) {
    text = error.message;
  }
  $("plot-note").textContent = text;
  $("plot-submit").disabled = count === 0;
}

async function submit() {
  const [x, y] = [axis("x"), axis("y")];
  const request = { ...form.request(), ...(await inputs.fields()) };
  prompts.remember(request.prompt);
  request.prompt = prompts.styled(request.prompt);
  delete request.n;
  const json = ({ field, values }) => `{"field":${JSON.stringify(field)},"values":[${values.join(",")}]}`;
  const body = `{"request":${seed.toJson(request, seed.next())},"x":${json(x)}${y ? `,"y":${json(y)}` : ""}}`;
  const plot = await send("POST", "/v1/plots", body);
  $("plot-dialog").close();
  for (const view of plot.rows.flat()) jobs.watch(view);
  show(plot);
  openDialog($("plot-view"));
}

/** Shows a plot, and looks again until all of its jobs have ended. */
function show(plot) {
  shown = plot;
  const head = make("tr", {}, make("td"), ...plot.x.values.map((value) => make("th", { scope: "col", textContent: `${label(plot.x.field)} ${value}` })));
  const rows = plot.rows.map((row, i) => make("tr", {},
    make("th", { scope: "row", textContent: plot.y ? `${label(plot.y.field)} ${plot.y.values[i]}` : "" }), ...row.map((view) => make("td", {}, cell(view)))));
  $("plot-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  const views = plot.rows.flat().filter(Boolean);
  const unfinished = views.filter(({ status }) => status === "queued" || status === "running").length;
  $("plot-status").textContent = unfinished ? `${views.length - unfinished} of ${views.length} done` : `${views.length} ${views.length === 1 ? "image" : "images"}`;
  $("plot-save").disabled = !views.some((view) => view.images.length);
  clearTimeout(timer);
  if (unfinished) timer = setTimeout(() => $("plot-view").open && trying(() => reload(plot.id)), INTERVAL);
}

const load = async (id) => show(await call(`/v1/plots/${id}`));

/** Shows how far a plot is, if it is still the one that is shown. */
async function reload(id) {
  const plot = await call(`/v1/plots/${id}`);
  whenReleased(() => shown?.id === id && show(plot));
}

function cell(view) {
  const image = view?.images[0];
  if (!image) return make("span", { className: "note", textContent: view ? { queued: "Queued", running: "…" }[view.status] ?? view.error?.message ?? view.status : "Deleted" });
  const show = button("", () => open(image), { className: "open", title: image.prompt });
  show.append(makeImage(image.thumbnail, { alt: `${image.prompt}, seed ${image.seed}` }));
  return show;
}

/** Saves the plot as one image with its labels. */
async function saveImage() {
  const { x, y, rows } = shown;
  const canvas = make("canvas", { width: LABEL * 2 + CELL * x.values.length, height: LABEL + CELL * rows.length });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  [context.fillStyle, context.font, context.textAlign, context.textBaseline] = ["#000", "18px sans-serif", "center", "middle"];
  x.values.forEach((value, i) => context.fillText(`${label(x.field)} ${value}`, LABEL * 2 + CELL * (i + 0.5), LABEL / 2, CELL));
  for (const [j, row] of rows.entries()) {
    const top = LABEL + CELL * j;
    if (y) {
      context.fillText(label(y.field), LABEL, top + CELL / 2 - 12, LABEL * 2);
      context.fillText(y.values[j], LABEL, top + CELL / 2 + 12, LABEL * 2);
    }
    for (const [i, view] of row.entries()) {
      if (!view?.images[0]) continue;
      const image = await loadImage(view.images[0].url);
      const scale = Math.min(CELL / image.naturalWidth, CELL / image.naturalHeight);
      const [w, h] = [image.naturalWidth * scale, image.naturalHeight * scale];
      context.drawImage(image, LABEL * 2 + CELL * i + (CELL - w) / 2, top + (CELL - h) / 2, w, h);
    }
  }
  save(await new Promise((resolve) => canvas.toBlob(resolve, "image/png")), `plot-${shown.id.slice(0, 8)}.png`);
}

async function showLatest() {
  const { data } = await call("/v1/plots");
  $("plot-latest").replaceChildren(...data.slice(0, 8).map((plot) => make("li", {}, button(
    `${[plot.x, plot.y].filter(Boolean).map((axis) => `${label(axis.field)} (${axis.values.length})`).join(" × ")}, ${new Date(plot.created).toLocaleString()}`,
    () => trying(async () => {
      await load(plot.id);
      $("plot-dialog").close();
      openDialog($("plot-view"));
    }), { className: "entry" }))));
  $("plot-latest-field").hidden = data.length === 0;
}

export function listen(openImage) {
  open = openImage;
  const choices = FIELDS.map(([value, text]) => [value, text]);
  $("x-field").replaceChildren(...options(choices));
  $("y-field").replaceChildren(...options([["", "None"], ...choices]));
  [$("x-field").value, $("y-field").value] = ["seed", "steps"];
  for (const id of ["x-field", "y-field", "x-values", "y-values"]) $(id).oninput = check;
  $("plot-open").onclick = () => trying(async () => {
    if (!form.isValid()) return;
    await showLatest();
    check();
    openDialog($("plot-dialog"));
  });
  const start = exclusive(submit);
  $("plot-form").onsubmit = (event) => {
    event.preventDefault();
    start();
  };
  $("plot-save").onclick = exclusive(saveImage);
}
