// Settings: advanced ones, sizes, prompts, styles, LoRAs, models, notifications.

import assert from "node:assert/strict";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import { png, openPage, startAlone, startHub } from "./harness.mjs";
import { count, generate, hidden, matches, reload, shot, small, submitted, test, visible, violations } from "./steps.mjs";

test("advanced settings are sent, shown and reused", async (page) => {
  await page.click("#advanced summary");
  await page.selectOption("#rng", "cuda");
  await hidden(page, "#rho-field");
  await page.selectOption("#schedule", "power");
  await visible(page, "#rho-field");
  await page.fill("#rho", "1.5");
  await page.fill("#max-tokens", "32");
  // The server has no VAEs to choose from.
  await hidden(page, "#vae-field");
  await shot(page, "advanced");
  let sent = submitted(page);
  await generate(page, "a hat");
  let body = (await sent).postDataJSON();
  assert.deepEqual([body.rng, body.schedule, body.rho, body.max_tokens], ["cuda", "power", 1.5, 32]);
  assert.ok(!("sigmas" in body) && !("vae" in body), "empty fields are not sent");

  await page.selectOption("#rng", "");
  await page.selectOption("#schedule", "");
  await page.fill("#max-tokens", "");
  await page.fill("#sigmas", "1, 0.5");
  sent = submitted(page);
  await generate(page, "a glove");
  body = (await sent).postDataJSON();
  assert.deepEqual(body.sigmas, [1, 0.5]);
  assert.ok(!("rho" in body), "rho is sent only with its schedule");

  await page.locator("#grid .open").nth(1).click();
  await page.waitForSelector("#viewer[open]");
  await matches(page, "#viewer-facts", /Schedulepower.*Rho1\.5/s);
  await page.click("#viewer-actions button:text('Reuse settings')");
  await matches(page, "#prompt", /^a hat$/);
  for (const [id, value] of [["rng", "cuda"], ["schedule", "power"], ["rho", "1.5"], ["max-tokens", "32"], ["sigmas", ""]]) {
    assert.equal(await page.inputValue(`#${id}`), value);
  }
  await reload(page);
  assert.equal(await page.inputValue("#sigmas"), "1, 0.5", "the form is saved");
  await page.fill("#sigmas", "");
});

test("width and height are swapped", async (page) => {
  await page.click("#presets button:text('Wide')");
  const read = async () => [await page.inputValue("#width-number"), await page.inputValue("#height-number")];
  const wide = await read();
  await page.click("#swap-size");
  assert.deepEqual(await read(), wide.reverse());
  await matches(page, "#presets button:nth-child(3)", /true/, "aria-pressed");
  await small(page);
});

test("earlier prompts come back, with the keyboard too", async (page) => {
  for (const prompt of ["a first prompt", "a second prompt"]) await generate(page, prompt);
  await page.fill("#prompt", "half typed");
  await page.focus("#prompt");
  const read = () => page.inputValue("#prompt");
  await page.keyboard.press("Alt+ArrowUp");
  assert.equal(await read(), "a second prompt");
  await page.keyboard.press("Alt+ArrowUp");
  assert.equal(await read(), "a first prompt");
  for (let i = 0; i < 2; i++) await page.keyboard.press("Alt+ArrowDown");
  assert.equal(await read(), "half typed");
  await page.click("#history-open");
  await page.fill("#history-search", "FIRST");
  await count(page, "#history-list li", 1);
  assert.deepEqual(await violations(page), []);
  await page.click("#history-list .entry");
  assert.equal(await read(), "a first prompt");
});

test("styles are used, added and deleted with undo", async (page) => {
  await page.selectOption("#style", "Ink drawing");
  let sent = submitted(page);
  await generate(page, "an owl");
  assert.match((await sent).postDataJSON().prompt, /^ink drawing of an owl, /);
  assert.equal(await page.inputValue("#prompt"), "an owl", "the form keeps the prompt");
  await page.selectOption("#style", "");
  await page.click("#style-edit");
  await page.fill("#style-name", "Neon");
  await page.fill("#style-text", "neon sign of {prompt}");
  assert.deepEqual(await violations(page), []);
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await hidden(page, "#style-dialog");
  await reload(page);
  assert.equal(await page.inputValue("#style"), "Neon");
  await page.click("#style-edit");
  await page.click("#style-delete");
  assert.equal(await page.inputValue("#style"), "");
  await page.click(".toast-action");
  assert.equal(await page.inputValue("#style"), "Neon");
  await page.selectOption("#style", "");
});

test("LoRAs from subfolders have previews and trigger words", async (page, { server }) => {
  mkdirSync(join(server.folder, "loras/styles"), { recursive: true });
  const header = Buffer.from(JSON.stringify({ __metadata__: { "modelspec.trigger_phrase": "inkwash" } }));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(header.length));
  writeFileSync(join(server.folder, "loras/styles/ink.safetensors"), Buffer.concat([length, header]));
  writeFileSync(join(server.folder, "loras/styles/ink.png"), png(64, 64, [30, 30, 90]));
  await reload(page);
  await matches(page, "#lora-choice", /^styles\/ink$/);
  await matches(page, "#lora-triggers", /inkwash/);
  await page.waitForFunction(() => document.querySelector("#lora-preview").naturalWidth === 64);
  await page.click("#lora-add");
  await page.fill("#prompt", "an owl");
  await page.click("#loras .triggers button");
  assert.equal(await page.inputValue("#prompt"), "an owl, inkwash");
  await shot(page, "loras");
  assert.deepEqual(await violations(page), []);
  await page.click("#loras [aria-label='Remove styles/ink']");
});

test("a model is downloaded with progress, cancelled, resumed and used", async (_, { browser }) => {
  const hub = await startHub("black-forest-labs/FLUX.2-klein-4B", [["", `${process.env.TESTDATA}/tiny/klein`], ["tokenizer/", `${process.env.TESTDATA}/tokenizer`]]);
  process.env.HF_ENDPOINT = hub.endpoint;
  const server = await startAlone();
  const context = await browser.newContext({ viewport: { width: 1000, height: 800 } });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await page.click("#models-open");
    await matches(page, "#models-here li", /ember/);
    await page.click("[aria-label='Download klein-4b']");
    await page.waitForFunction(() => document.querySelector("#models-more progress")?.value > 0);
    await shot(page, "models");
    assert.deepEqual(await violations(page), []);
    await page.click("[aria-label='Cancel the download of klein-4b']");
    hub.release();
    await page.click("[aria-label='Resume klein-4b']");
    await matches(page, ".toast-text", /klein-4b is ready/);
    await page.click(".toast-action");
    await page.keyboard.press("Escape");
    assert.equal(await page.inputValue("#model"), "klein-4b");
  } finally {
    delete process.env.HF_ENDPOINT;
    await context.close();
    await server.stop();
    hub.stop();
  }
});

test("a notification tells of a job that ends in the background", async (_, { browser, server }) => {
  const context = await browser.newContext({ permissions: ["notifications"] });
  try {
    const page = await openPage(context, server.address, (page) => page.addInitScript(() => {
      globalThis.notices = [];
      const Stub = class {
        static permission = "default";
        static requestPermission = async () => (Stub.permission = "granted");
        constructor(title, { body }) {
          globalThis.notices.push(`${title}: ${body}`);
        }
      };
      globalThis.Notification = Stub;
    }));
    await page.waitForSelector("[data-ready]");
    await page.click("#bell");
    await matches(page, "#bell", /true/, "aria-pressed");
    await generate(page, "a seen cat");
    await page.evaluate(() => Object.defineProperty(document, "visibilityState", { get: () => "hidden" }));
    await generate(page, "a cat behind");
    assert.deepEqual(await page.evaluate(() => globalThis.notices), ["The image is ready: a cat behind"]);
    await page.click("#bell");
    await matches(page, "#bell", /false/, "aria-pressed");
  } finally {
    await context.close();
  }
});
