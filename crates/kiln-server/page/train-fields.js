// The settings of a training as controls: those of the form, and one for every other field that the API describes.

import { call } from "./api.js";
import { $, make, options } from "./dom.js";

/** The form offers base models only. */
const LEFT_OUT = ["distilled_anyway"];

const controls = () => [...$("train-form").querySelectorAll("[data-field]")];

/** Adds controls for the fields that have none. */
export async function prepare() {
  if ($("train-more").dataset.filled) return;
  const { schemas } = (await call("/openapi.json")).components;
  const resolve = (schema) => (schema.$ref ? { ...schemas[schema.$ref.split("/").pop()], description: schema.description } : schema);
  const present = new Set([...LEFT_OUT, ...controls().map(({ dataset }) => dataset.field)]);
  const missing = Object.entries(schemas.TrainRequest.properties).filter(([name]) => !present.has(name));
  $("train-more").dataset.filled = true;
  $("train-more").append(...missing.map(([name, field]) => pair(name, resolve(field.oneOf?.[0] ?? field))));
}

function pair(name, schema) {
  const [, title, standard = ""] = schema.description.replaceAll("\n", " ").match(/^(.*?)(?: \[default: (.*)\])?$/);
  const id = `train-field-${name}`;
  const text = name.replaceAll("_", " ");
  const label = make("label", { htmlFor: id, title, textContent: text[0].toUpperCase() + text.slice(1) });
  const control = schema.enum
    ? make("select", {}, ...options([["", standard], ...schema.enum.map((value) => [value, value])]))
    : make("input", limits(schema, standard));
  Object.assign(control, { id, title });
  control.dataset.field = name;
  if (schema.type !== "string" && control.type === "text") control.dataset.list = "";
  return make("div", { className: "pair" }, label, control);
}

function limits({ type, minimum = "", maximum = "" }, placeholder) {
  const types = [type].flat();
  if (types.includes("boolean")) return { type: "checkbox" };
  if (types.includes("integer")) return { type: "number", min: minimum, max: maximum, step: 1, placeholder };
  if (types.includes("number")) return { type: "number", min: minimum, max: maximum, step: "any", placeholder };
  return { type: "text", placeholder };
}

/** The value of a control; `undefined` if it is left out. In a list, numbers are separated by commas. */
function value(control) {
  if (control.type === "checkbox") return control.checked || undefined;
  const text = control.value.trim();
  if (text === "") return undefined;
  if (control.type === "number") return control.valueAsNumber;
  if (control.tagName === "TEXTAREA") return text.split("\n").map((line) => line.trim()).filter(Boolean);
  const numbers = text.split(",").filter((part) => part.trim()).map(Number);
  return "list" in control.dataset && numbers.every(Number.isFinite) ? numbers : text;
}

/** The settings. */
export const values = () =>
  Object.fromEntries(controls().map((control) => [control.dataset.field, value(control)]).filter(([, given]) => given !== undefined));
