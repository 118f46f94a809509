// The seed: a new random one for each job, unless it is locked, typed or rolled.

import { $ } from "./dom.js";

const LARGEST = 2n ** 64n - 1n;
/** Whether the next job uses the seed that the dice gave. */
let rolled = false;

const isLocked = () => $("lock").getAttribute("aria-pressed") === "true";

function random() {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0];
  check();
}

/** Rolls the seed of the next job. */
export function roll() {
  random();
  rolled = true;
}

export function lock(locked = !isLocked()) {
  $("lock").setAttribute("aria-pressed", locked);
}

/** Explains what is wrong with the seed, in words for people. */
function check() {
  const text = $("seed").value.trim();
  const isNumber = /^[0-9]*$/.test(text);
  let problem = "";
  if (!isNumber) problem = "A seed is a whole number without a sign.";
  else if (text && BigInt(text) > LARGEST) problem = `The seed is too large: the largest one is ${LARGEST}.`;
  $("seed").setCustomValidity(problem);
}

export function fill(seed) {
  $("seed").value = seed;
  check();
}

/** The seed of the next job, as text: JavaScript's numbers are exact up to 2^53 only. */
export function next() {
  if ($("seed").value.trim() === "" || !(isLocked() || rolled)) random();
  rolled = false;
  return $("seed").value.trim();
}

/** JSON of a request with the exact digits of a seed. */
export function toJson(request, seed) {
  const text = JSON.stringify(request);
  return `${text.slice(0, -1)},"seed":${seed.replace(/^0+(?=.)/, "")}}`;
}

export function listen() {
  $("dice").onclick = roll;
  $("lock").onclick = () => lock();
  // Typing a seed locks it.
  $("seed").oninput = () => {
    check();
    lock($("seed").value !== "");
  };
}
