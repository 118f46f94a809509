// Models: choose one, download more.

import { call, send } from "./api.js";
import { $, button, bytes, make, openDialog, whenReleased } from "./dom.js";
import * as form from "./form.js";
import { exclusive, fail, note, trying } from "./notices.js";

/** Time between two looks at a running download, in milliseconds. */
const INTERVAL = 1000;
let timer = null;
/** The model that is being downloaded. */
let running = null;

async function load() {
  const list = await call("/v1/downloads");
  const now = list.data.find(({ status }) => status === "running")?.model ?? null;
  const ended = running && running !== now ? list.data.find(({ model }) => model === running) : null;
  running = now;
  if (ended) await announce(ended);
  whenReleased(() => show(list));
  clearTimeout(timer);
  if (running) timer = setTimeout(() => trying(load), INTERVAL);
}

async function announce({ model, status, error }) {
  if (status === "failed") return fail(`The download of ${model} failed: ${error}`);
  if (status !== "done") return undefined;
  await form.reloadModels();
  return note(`${model} is ready.`, "Use it", () => form.selectModel(model));
}

function show({ data, available }) {
  const installed = [...$("model").options].map(({ value }) => value);
  const state = (name) => data.find(({ model }) => model === name);
  const here = installed.map((name) => make("li", {}, make("span", { className: "name", textContent: name }),
    button(name === $("model").value ? "In use" : "Use", () => {
      form.selectModel(name);
      $("models").close();
      $("model").focus();
    }, { disabled: name === $("model").value, "aria-label": name === $("model").value ? `In use: ${name}` : `Use ${name}` })));
  const others = available.filter((model) => !model.installed && !installed.includes(model.name)).map((model) => row(model, state(model.name)));
  $("models-here").replaceChildren(...here);
  const focused = document.activeElement?.dataset?.model;
  $("models-more").replaceChildren(...others);
  if (focused) $("models-more").querySelector(`[data-model="${focused}"]`)?.focus();
  $("models-more-field").hidden = others.length === 0;
}

function row({ name, source, licence }, download) {
  const item = make("li", {}, make("span", { className: "name", textContent: name, title: source }));
  const act = (text, action, label) => {
    const tool = button(text, exclusive(async () => {
      await action();
      await load();
    }), { "aria-label": label });
    tool.dataset.model = name;
    return tool;
  };
  if (download?.status === "running") {
    const { bytes: done, total } = download;
    item.append(make("progress", { max: total || 1, value: done, "aria-label": `Download of ${name}` }),
      make("span", { className: "note", textContent: total ? `${bytes(done)} of ${bytes(total)}` : "Starting" }),
      act("Cancel", () => call(`/v1/downloads/${name}`, { method: "DELETE" }), `Cancel the download of ${name}`));
  } else {
    const start = download ? "Resume" : "Download";
    const text = licence ? `Accept the licence and ${start.toLowerCase()}` : start;
    item.append(make("span", { className: "note", textContent: download?.error ?? source }));
    if (licence) {
      item.append(make("a", { className: "note", href: licence.url, target: "_blank", rel: "noreferrer", textContent: licence.name }));
    }
    item.append(act(text, () => send("POST", "/v1/downloads", { model: name, accept_license: Boolean(licence) }), `${text} ${name}`));
  }
  return item;
}

export function listen() {
  $("models-open").onclick = () => trying(async () => {
    await form.reloadModels();
    await load();
    openDialog($("models"));
  });
}
