// The advanced panel: rarely used settings; empty ones are left to the model.

import { call } from "./api.js";
import { $ } from "./dom.js";
import * as fields from "./fields.js";

/** Fields with controls elsewhere, and what the page does not offer. */
const LEFT_OUT = [
  "prompt", "original_prompt", "negative_prompt", "model", "loras", "width", "height", "n", "seed", "one_generator",
  "references", "init", "mask", "strength", "mask_padding", "upscale", "tile_size", "steps", "guidance",
  "output_format", "output_compression", "png",
];

/** Fetches the choices, and adds controls for the fields that have none. */
export async function prepare({ tokens }) {
  const [vaes, described] = await Promise.all([call("/v1/vaes"), fields.describe("Request")]);
  fields.setChoices($("vae"), vaes.data, "The model's own");
  $("vae-field").hidden = vaes.data.length === 0;
  $("max-tokens").max = tokens;
  fields.complete($("advanced"), $("advanced"), described, LEFT_OUT);
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
  fields.fill($("advanced"), request);
  showRho();
  // Don't hide settings that are in effect.
  if (Object.keys(values()).length) $("advanced").open = true;
}

/** The fields that are set. */
export const values = () => fields.values($("advanced"));

/** The advanced settings of a request, as names and texts. */
export const facts = (request) => fields.facts($("advanced"), request);

export function listen() {
  $("schedule").onchange = showRho;
}
