// Trainings: images with captions, the loss curve, samples, cancel and resume, and using the LoRA at once.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { openPage, png, startAlone } from "./harness.mjs";
import { count, hidden, matches, shot, steps, test, visible, violations } from "./steps.mjs";

export const file = (name, colour) => ({ name, mimeType: "image/png", buffer: png(64, 64, colour) });
const text = (name, caption) => ({ name, mimeType: "text/plain", buffer: Buffer.from(caption) });

/** Starts a server that trains, with Ember base among its models, and opens its page. */
export async function open(browser, ...options) {
  const models = process.env.KILN_MODELS;
  process.env.KILN_MODELS = join(process.env.TESTDATA, "../assets/ember");
  const server = await startAlone("--train", ...options);
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 }, colorScheme: "dark" });
  const page = await openPage(context, server.address);
  // Loading models and encoding images takes a while on a busy machine.
  page.setDefaultTimeout(90_000);
  if (options.includes("--api-key")) await signIn(page, options[options.indexOf("--api-key") + 1]);
  await page.waitForSelector("[data-ready]");
  const close = async (last = server) => {
    await context.close();
    await last.stop();
    if (models === undefined) delete process.env.KILN_MODELS;
    else process.env.KILN_MODELS = models;
  };
  return { page, server, close };
}

export async function signIn(page, key) {
  await page.waitForSelector("#key-dialog[open]");
  await page.fill("#key", key);
  await page.keyboard.press("Enter");
  await hidden(page, "#key-dialog");
}

/** Fills in the form of a small training. */
export async function fill(page, name, n) {
  await page.click("#train-open");
  await visible(page, "#train-form");
  await page.setInputFiles("#train-files", [file("fox.png", [200, 90, 20]), file("hen.png", [240, 230, 200]), text("fox.txt", "a fox on orange")]);
  await count(page, "#train-images li", 2);
  await page.fill("#train-name", name);
  await page.selectOption("#train-model", "ember-base");
  if (!(await page.isVisible("#train-steps"))) await page.click("#train-settings");
  await page.fill("#train-steps", String(n));
  await page.fill("#train-resolution", "64");
}

test("without the operator's leave there is no training", async (page) => {
  await hidden(page, "#train-open");
});

test("a LoRA is trained from dropped images, and used at once", async (_, { browser }) => {
  const { page, server, close } = await open(browser);
  try {
    await fill(page, "My fox", 4);
    assert.deepEqual(await page.locator("#train-images textarea").evaluateAll((all) => all.map((field) => field.value)), ["a fox on orange", ""]);
    // The missing caption is told before it starts.
    await matches(page, "#train-warnings", /1 of 2 images have no caption/);
    await page.fill("#train-images li:nth-child(2) textarea", "a hen");
    await page.fill("#train-trigger", "zorp");
    await page.press("#train-trigger", "Tab");
    await matches(page, "#train-cost", /2 examples: 64x64 \(2\).*of memory/);
    await page.fill("#train-prompts", "a zorp star");
    // Fields that the page has no control of its own for follow from the API's description.
    await page.click("#train-more summary");
    await page.fill("#train-form-warmup", "2");
    await page.fill("#train-form-ranks", "2, 2, 1, 1");
    await page.selectOption("#train-form-optimizer", "adamw8bit");
    await page.check("#train-flip");
    await shot(page, "train-form");
    assert.deepEqual(await violations(page), []);
    await page.click("#train-start");
    await visible(page, "#train-view");
    await matches(page, "#train-status", /Done/);
    const { request } = (await (await fetch(`${server.address}/v1/trainings`)).json()).data[0];
    const { warmup, ranks, optimizer, flip, clip } = request;
    assert.deepEqual({ warmup, ranks, optimizer, flip, clip }, { warmup: 2, ranks: [2, 2, 1, 1], optimizer: "adamw8bit", flip: true, clip: undefined });
    await page.waitForFunction(() => document.querySelector("#train-chart .smooth").getAttribute("points").split(" ").length === 4);
    await page.waitForFunction(() => [...document.querySelectorAll("#train-samples img")].some((image) => image.naturalWidth > 0));
    await shot(page, "train-done");
    assert.deepEqual(await violations(page), []);
    await page.setViewportSize({ width: 390, height: 800 });
    assert.ok(await page.evaluate(() => document.querySelector("#train").scrollWidth <= document.querySelector("#train").clientWidth), "no sideways scrolling");
    await shot(page, "train-phone");
    await page.setViewportSize({ width: 1200, height: 900 });
    const download = page.waitForEvent("download");
    await page.click("#train-download");
    assert.equal((await download).suggestedFilename(), "My fox.safetensors");
    const weights = readFileSync(await (await download).path());
    assert.match(weights.subarray(8, 9 + Number(weights.readBigUInt64LE())).toString(), /^\{.*lora/, "a safetensors file");
    await page.fill("#prompt", "a star");
    await page.click("#train-use");
    await hidden(page, "#train");
    await matches(page, "#loras .name", /^My fox$/);
    await matches(page, "#prompt", /zorp/);
    await matches(page, "#model", /^ember$/);
    await steps(page, 2);
    await page.click("#generate");
    await count(page, "#grid li", 1);
    // Deleted after a question, wherever it is shown.
    await page.locator("#lora-delete").scrollIntoViewIfNeeded();
    await shot(page, "lora-tools");
    await page.dblclick("#lora-delete");
    await page.waitForTimeout(300);
    await matches(page, "#loras .name", /^My fox$/);
    await matches(page, ".toast-text", /Delete the LoRA “My fox”/);
    await page.locator(".toast-action").first().click();
    await hidden(page, "#loras-field");
    await count(page, "#loras li", 0);
    const { data } = await (await fetch(`${server.address}/v1/loras/details`)).json();
    assert.deepEqual(data, []);
    await page.click("#train-open");
    await page.click("#train-list .entry");
    await matches(page, "#train-status", /Done/);
    for (const id of ["#train-use", "#train-download", "#train-lora-delete"]) await hidden(page, id);
  } finally {
    await close();
  }
});

test("a training is cancelled, resumed, survives a kill, and is deleted", async (_, { browser }) => {
  const { page, server, close } = await open(browser);
  let last = server;
  try {
    await fill(page, "long", 3000);
    await page.fill("#train-trigger", "zorp");
    await page.click("#train-start");
    await matches(page, "#train-text", /Step [2-9]\d* of 3000/);
    await page.click("#train-cancel");
    await matches(page, "#train-status", /Cancelled/);
    await page.focus("#train-resume");
    await page.keyboard.press("Enter");
    await matches(page, "#train-status", /Training/);
    await matches(page, "#train-open", /Train \d+ %/);
    await matches(page, "#train-text", /Step \d{2,} of 3000/);
    await server.kill();
    last = await server.restart();
    await matches(page, "#train-status", /Interrupted/);
    await matches(page, "#train-text", /Stopped at step \d{2,} of 3000.*Resume/);
    await shot(page, "train-interrupted");
    await visible(page, "#train-resume");
    // Asked every time: neither a double click nor a second thought deletes anything.
    await page.dblclick("#train-delete");
    await page.waitForTimeout(500);
    assert.equal(await page.locator("#train-list li").count(), 1);
    await page.locator(".toast-close").first().click();
    await page.click(".toast-action");
    await visible(page, "#train-form");
    await count(page, "#train-list li", 0);
  } finally {
    await close(last);
  }
});
