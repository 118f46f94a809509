// Controls of the fields that the API describes: those of the document, marked with `data-field`, and one for every other.

import { call } from "./api.js";
import { make, options } from "./dom.js";

const controls = (root) => [...root.querySelectorAll("[data-field]")];

/** Whether a control does not apply; the whole form may be hidden, too. */
function isHidden(control, root) {
  const hidden = control.closest("[hidden]");
  return hidden !== root && root.contains(hidden);
}

/** The fields of a structure by name, without references. */
export async function describe(structure) {
  const { schemas } = (await call("/openapi.json")).components;
  const resolve = (schema) => (schema.$ref ? { ...schemas[schema.$ref.split("/").pop()], description: schema.description } : schema);
  const fields = Object.entries(schemas[structure].properties);
  return Object.fromEntries(fields.map(([name, field]) => [name, resolve(field.oneOf?.[0] ?? field)]));
}

/** Adds controls for the fields that have none to `target`, and the choices of lists that are empty. */
export function complete(root, target, fields, leftOut) {
  for (const control of controls(root)) {
    const { enum: choices } = fields[control.dataset.field] ?? {};
    if (choices && !control.options?.length) setChoices(control, choices, "Default");
  }
  const present = new Set([...leftOut, ...controls(root).map(({ dataset }) => dataset.field)]);
  const missing = Object.entries(fields).filter(([name]) => !present.has(name));
  target.append(...missing.map(([name, schema]) => pair(`${root.id}-${name}`, name, schema)));
}

export function setChoices(control, names, empty) {
  control.replaceChildren(...options([["", empty], ...names.map((name) => [name, name])]));
}

function pair(id, name, schema) {
  const [, title, standard = ""] = schema.description.replaceAll("\n", " ").match(/^(.*?)(?: \[default: (.*)\])?$/);
  const text = name.replaceAll("_", " ");
  const label = make("label", { htmlFor: id, title, textContent: text[0].toUpperCase() + text.slice(1) });
  const control = schema.enum ? make("select") : make("input", limits(schema, standard));
  if (schema.enum) setChoices(control, schema.enum, standard);
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

/** The fields that are set and shown. */
export function values(root) {
  const given = controls(root).filter((control) => !isHidden(control, root)).map((control) => [control.dataset.field, value(control)]);
  return Object.fromEntries(given.filter(([, value]) => value !== undefined));
}

/** Fills in the fields of a request; absent ones, and choices that are not offered, become empty. */
export function fill(root, request) {
  for (const control of controls(root)) {
    const value = request[control.dataset.field];
    if (control.type === "checkbox") control.checked = value === true;
    else control.value = [value ?? ""].flat().join(", ");
    // A list has no choice without a value of its own.
    if (control.tagName === "SELECT" && control.selectedIndex < 0) control.value = "";
  }
}

/** The fields of a request as the labels of their controls and texts. */
export const facts = (root, request) =>
  controls(root).map((control) => [control.labels[0].textContent, [request[control.dataset.field] ?? ""].flat().join(", ")]);
