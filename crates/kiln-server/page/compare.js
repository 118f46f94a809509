// Two images side by side, or one over the other with a slider between them.

import { $, memory, openDialog } from "./dom.js";
import { showImage } from "./image.js";

let [left, right] = [null, null];

function show() {
  for (const [side, image] of [["left", left], ["right", right]]) {
    for (const element of [$(`${side}-image`), $(`${side}-over`)]) {
      showImage(element, image.url);
      element.alt = image.prompt;
    }
    const request = image.request;
    $(`${side}-facts`).textContent = [image.prompt, image.model, `${image.width} × ${image.height}`,
      request.steps && `${request.steps} steps`, request.guidance && `guidance ${request.guidance}`, `seed ${image.seed}`].filter(Boolean).join(" · ");
  }
}

function setMode(slider) {
  memory.set("compare", slider ? "slider" : "side");
  $("compare-slider").setAttribute("aria-pressed", slider);
  $("compare-side").setAttribute("aria-pressed", !slider);
  $("over").hidden = !slider;
  for (const side of ["left", "right"]) $(`${side}-image`).hidden = slider;
}

/** Puts the divider under the middle of the slider's thumb, which is 28 pixels wide. */
const setDivider = () => $("over").style.setProperty("--divider", `calc(14px + (100% - 28px) * ${$("divider").value / 100})`);

export function compare(newer, older) {
  [left, right] = [older, newer];
  $("divider").value = 50;
  setDivider();
  setMode(memory.get("compare") === "slider");
  show();
  openDialog($("comparison"));
}

export function listen() {
  $("divider").oninput = setDivider;
  $("compare-side").onclick = () => setMode(false);
  $("compare-slider").onclick = () => setMode(true);
  $("swap").onclick = () => {
    [left, right] = [right, left];
    show();
  };
}
