// The advanced panel: what is seldom changed, left to the model when empty.

import { call } from "./api.js";
import { $, make } from "./dom.js";

/** Fields that are chosen from a list; an empty choice is the default. */
const CHOICES = ["rng", "schedule", "vae"];

/** Fetches what can be chosen. The kinds of random numbers and schedules are those of the API's description. */
export async function prepare({ tokens }) {
  const [vaes, api] = await Promise.all([call("/v1/vaes"), call("/openapi.json")]);
  const kinds = (name) => api.components.schemas[name].enum;
  choices("vae", vaes.data, "The model's own");
  choices("rng", kinds("Rng"), "Default");
  choices("schedule", kinds("ScheduleKind"), "Default");
  $("vae-field").hidden = vaes.data.length === 0;
  $("max-tokens").max = tokens;
}

function choices(id, names, empty) {
  const option = (value, textContent) => make("option", { value, textContent });
  $(id).replaceChildren(option("", empty), ...names.map((name) => option(name, name)));
}

function showRho() {
  $("rho-field").hidden = $("schedule").value !== "power";
}

/** Puts a kept form or a job's values in; what is absent is left to the model. */
export function fill(asked) {
  for (const id of CHOICES) {
    const known = [...$(id).options].some((option) => option.value === asked[id]);
    $(id).value = known ? asked[id] : "";
  }
  $("rho").value = asked.rho ?? "";
  $("sigmas").value = (asked.sigmas ?? []).join(", ");
  $("max-tokens").value = asked.max_tokens ?? "";
  showRho();
  // What is in effect is not hidden.
  if (Object.keys(values()).length) $("advanced").open = true;
}

/** The fields that are not left to the model. */
export function values() {
  const asked = {};
  for (const id of CHOICES) if ($(id).value) asked[id] = $(id).value;
  if ($("schedule").value === "power" && $("rho").value !== "") asked.rho = $("rho").valueAsNumber;
  const sigmas = $("sigmas").value.split(",").map((text) => text.trim()).filter(Boolean);
  if (sigmas.length) asked.sigmas = sigmas.map(Number);
  if ($("max-tokens").value !== "") asked.max_tokens = $("max-tokens").valueAsNumber;
  return asked;
}

/** What a job asks for here, as names and texts. */
export function facts(order) {
  return [
    ["Autoencoder", order.vae],
    ["Random numbers", order.rng],
    ["Schedule", [order.schedule, order.rho && `rho ${order.rho}`].filter(Boolean).join(", ")],
    ["Noise levels", order.sigmas?.join(", ")],
    ["Prompt tokens", order.max_tokens],
  ];
}

export function listen() {
  $("schedule").onchange = showRho;
}
