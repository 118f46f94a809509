// The advanced panel: rarely used settings; empty ones are left to the model.

import { call } from "./api.js";
import { $, make } from "./dom.js";

/** Fields with a list of choices; the empty choice is the default. */
const CHOICES = ["dora_rule", "rng", "schedule", "vae"];

/** Fetches the choices. Those that are the same for every server come from the OpenAPI description. */
export async function prepare({ tokens }) {
  const [vaes, api] = await Promise.all([call("/v1/vaes"), call("/openapi.json")]);
  const variants = (name) => api.components.schemas[name].enum;
  setChoices("vae", vaes.data, "The model's own");
  setChoices("dora_rule", variants("DoraRuleName"), "Default");
  setChoices("rng", variants("Rng"), "Default");
  setChoices("schedule", variants("ScheduleKind"), "Default");
  $("vae-field").hidden = vaes.data.length === 0;
  $("max-tokens").max = tokens;
}

function setChoices(id, names, empty) {
  const option = (value, textContent) => make("option", { value, textContent });
  $(id).replaceChildren(option("", empty), ...names.map((name) => option(name, name)));
}

function showRho() {
  $("rho-field").hidden = $("schedule").value !== "power";
}

/** Adapts the panel to a model: only models with guidance take enough steps for the cache. */
export function useModel({ guidance }) {
  $("cache-field").hidden = guidance === null;
}

/** Fills in a saved form or the values of a request; absent fields are left to the model. */
export function fill(request) {
  for (const id of CHOICES) {
    const known = [...$(id).options].some((option) => option.value === request[id]);
    $(id).value = known ? request[id] : "";
  }
  $("rho").value = request.rho ?? "";
  $("sigmas").value = (request.sigmas ?? []).join(", ");
  $("max-tokens").value = request.max_tokens ?? "";
  $("text-layers").value = (request.text_layers ?? []).join(", ");
  $("cache").value = request.cache ?? "";
  showRho();
  // Don't hide settings that are in effect.
  if (Object.keys(values()).length) $("advanced").open = true;
}

/** The fields that are set. */
export function values() {
  const fields = {};
  for (const id of CHOICES) if ($(id).value) fields[id] = $(id).value;
  if ($("schedule").value === "power" && $("rho").value !== "") fields.rho = $("rho").valueAsNumber;
  for (const [id, name] of [["sigmas", "sigmas"], ["text-layers", "text_layers"]]) {
    const list = $(id).value.split(",").map((text) => text.trim()).filter(Boolean);
    if (list.length) fields[name] = list.map(Number);
  }
  if ($("max-tokens").value !== "") fields.max_tokens = $("max-tokens").valueAsNumber;
  if (!$("cache-field").hidden && $("cache").value !== "") fields.cache = $("cache").valueAsNumber;
  return fields;
}

/** The advanced settings of a request, as names and texts. */
export function facts(request) {
  return [
    ["VAE", request.vae],
    ["DoRA rule", request.dora_rule],
    ["Noise RNG", request.rng],
    ["Schedule", [request.schedule, request.rho && `rho ${request.rho}`].filter(Boolean).join(", ")],
    ["Sigmas", request.sigmas?.join(", ")],
    ["Prompt tokens", request.max_tokens],
    ["Text layers", request.text_layers?.join(", ")],
    ["Step cache", request.cache],
  ];
}

export function listen() {
  $("schedule").onchange = showRho;
}
