// Tests of the page of `kiln serve` in a real browser.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

import { png, startBrowser, startServer } from "./harness.mjs";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const shot = (page, name, options) => page.screenshot({ path: join(process.env.SHOTS, `${name}.png`), ...options });
const tests = [];
const test = (name, run) => tests.push({ name, run });

const submitted = (page) => page.waitForRequest((r) => r.url().endsWith("/v1/jobs") && r.method() === "POST");
const steps = (page, n) => page.fill("#steps-number", String(n)).then(() => page.dispatchEvent("#steps-number", "input"));

/** Waits until an element's value, text or attribute matches. */
const matches = (page, selector, pattern, attribute) => page.waitForFunction(
  ([selector, source, attribute]) => {
    const element = document.querySelector(selector);
    return element && new RegExp(source).test(attribute ? element.getAttribute(attribute) : element.value ?? element.textContent);
  },
  [selector, pattern.source, attribute],
);
const visible = (page, selector) => page.waitForSelector(selector, { state: "visible" });
const hidden = (page, selector) => page.waitForSelector(selector, { state: "hidden" });

/** Generates an image with few steps and waits for it. */
async function generate(page, prompt, n = 2) {
  await page.fill("#prompt", prompt);
  await steps(page, n);
  const before = await page.locator("#grid li").count();
  await page.click("#generate");
  await page.waitForFunction((count) => document.querySelectorAll("#grid li").length > count, before, { timeout: 60_000 });
  await page.waitForSelector("#working", { state: "hidden", timeout: 60_000 });
}

test("an image is generated with a live preview, progress and time left", async (page) => {
  await page.fill("#prompt", "a red apple on a blue background");
  await steps(page, 60);
  const before = await page.locator("#grid li").count();
  await page.keyboard.press("Control+Enter");
  await page.waitForSelector("#image.preview", { timeout: 60_000 });
  await page.waitForFunction(() => /Step \d+ of 60 · about .* left/.test(document.querySelector("#working-text").textContent));
  await page.waitForFunction(() => Number(document.querySelector("#bar").getAttribute("aria-valuenow")) > 40);
  await shot(page, "preview");
  await page.waitForSelector("#image:not(.preview)", { timeout: 60_000 });
  assert.equal(await page.evaluate(() => document.querySelector("#image").decode().then(() => document.querySelector("#image").naturalWidth)), 256);
  await page.waitForFunction((count) => document.querySelectorAll("#grid li").length === count + 1, before);
  await hidden(page, "#alert");
  await page.waitForFunction(() => [...document.querySelectorAll("#grid img")].every((i) => i.complete));
  await shot(page, "generated");
});

test("a job is cancelled with a key", async (page) => {
  await page.fill("#prompt", "a robot");
  await steps(page, 200);
  await page.click("#generate");
  // The hidden text still shows the previous job.
  await visible(page, "#working");
  await page.waitForFunction(() => /Step \d+/.test(document.querySelector("#working-text").textContent), null, { timeout: 60_000 });
  const started = Date.now();
  await page.keyboard.press("Escape");
  await page.waitForSelector("#working", { state: "hidden" });
  assert.ok(Date.now() - started < 5000);
  const jobs = await page.evaluate(() => fetch("/v1/jobs?limit=1").then((r) => r.json()));
  assert.equal(jobs.data[0].status, "cancelled");
});

test("a queued job can be cancelled", async (page) => {
  await page.fill("#prompt", "a house");
  await steps(page, 200);
  await page.click("#generate");
  await page.waitForSelector("#working:not([hidden])");
  await page.fill("#prompt", "a crown");
  await page.click("#generate");
  await page.waitForSelector("#queue li");
  await shot(page, "queue");
  await page.click("#queue li button");
  await page.waitForSelector("#queue li", { state: "detached" });
  await page.click("#cancel");
  await page.waitForSelector("#working", { state: "hidden" });
});

test("reference images are added, reordered and sent", async (page) => {
  const files = [["red.png", [200, 30, 30]], ["green.png", [30, 160, 60]]];
  await page.setInputFiles("#files", files.map(([name, colour]) => ({ name, mimeType: "image/png", buffer: png(128, 128, colour) })));
  await page.waitForFunction(() => document.querySelectorAll("#references li").length === 2);
  await page.click("[aria-label='Move reference 2 up']");
  await matches(page, "#references li:first-child img", /green/, "alt");
  await shot(page, "references");
  const sent = submitted(page);
  await generate(page, "make it a whale");
  const body = (await sent).postDataJSON();
  assert.equal(body.references.length, 2);
  const colour = await page.evaluate(async (id) => {
    const image = await createImageBitmap(await (await fetch(`/v1/inputs/${id.slice(6)}`)).blob());
    const canvas = new OffscreenCanvas(1, 1);
    canvas.getContext("2d").drawImage(image, 0, 0);
    return [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data];
  }, body.references[0]);
  assert.ok(colour[1] > colour[0], "the green image is first");
  const rejected = page.waitForSelector("#alert:not([hidden])");
  await page.setInputFiles("#files", { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("not an image") });
  await rejected;
  await matches(page, "#alert-text", /notes\.txt.*not an image/);
  await page.click("#alert-close");
  for (const _ of files) await page.click("#references [aria-label='Remove reference 1']");
});

test("a mask is painted with the brush and sent", async (page) => {
  await page.setInputFiles("#files", { name: "wall.png", mimeType: "image/png", buffer: png(256, 256, [220, 40, 40]) });
  await page.click("#references button:text('Use as initial image')");
  await page.click("#paint-mask");
  await visible(page, "#mask-board");
  const board = page.locator("#mask-board");
  const box = await board.boundingBox();
  const at = (x, y) => [box.x + box.width * x, box.y + box.height * y];
  await page.mouse.move(...at(0.3, 0.4));
  await page.mouse.down();
  for (const x of [0.4, 0.5, 0.6, 0.7]) await page.mouse.move(...at(x, 0.4 + (x - 0.3) / 2));
  await page.mouse.up();
  await shot(page, "mask");
  await page.click("#mask-done");
  await visible(page, "#remove-mask");
  const sent = submitted(page);
  await generate(page, "a yellow star", 4);
  const body = (await sent).postDataJSON();
  assert.ok(body.init && body.mask && body.strength > 0);
  const levels = await page.evaluate(async (id) => {
    const image = await createImageBitmap(await (await fetch(`/v1/inputs/${id.slice(6)}`)).blob());
    const canvas = new OffscreenCanvas(image.width, image.height);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const level = (x, y) => context.getImageData(x * image.width, y * image.height, 1, 1).data[0];
    return [level(0.5, 0.5), level(0.05, 0.95)];
  }, body.mask);
  assert.deepEqual(levels, [255, 0], "white inside the brush stroke, black outside");
  await shot(page, "masked");
  await page.click("#initial-to-reference");
  await page.click("#references [aria-label='Remove reference 1']");
});

test("images are searched, viewed, compared, reused and deleted", async (page) => {
  await generate(page, "a rocket");
  await generate(page, "a cat");
  await page.fill("#search", "rocket");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length === 1);
  await page.fill("#search", "no such words");
  await page.waitForFunction(() => document.querySelector("#gallery-empty").textContent.includes("No matching images"));
  await page.fill("#search", "");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length > 2);

  await page.locator("#grid input").nth(0).check();
  await page.waitForSelector("#compare:disabled");
  await page.locator("#grid input").nth(1).check();
  await page.click("#compare");
  await page.waitForSelector("#comparison[open]");
  await matches(page, "#left-facts", /a rocket/);
  await matches(page, "#right-facts", /a cat/);
  await page.waitForFunction(() => [...document.querySelectorAll(".two img")].every((i) => i.complete && i.naturalWidth));
  await shot(page, "comparison");
  await page.click("#swap");
  await matches(page, "#left-facts", /a cat/);
  await page.keyboard.press("Escape");

  await page.locator("#grid .open").nth(1).click();
  await page.waitForSelector("#viewer[open]");
  await matches(page, "#viewer-facts", /a rocket/);
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  await shot(page, "viewer");
  await page.keyboard.press("ArrowLeft");
  await matches(page, "#viewer-facts", /a cat/);
  await page.keyboard.press("ArrowRight");

  const download = page.waitForEvent("download");
  await page.click("#viewer-actions a");
  assert.match((await download).suggestedFilename(), /^a-rocket-\d+\.png$/);

  await page.click("#viewer-actions button:text('Reuse settings')");
  await matches(page, "#prompt", /^a rocket$/);
  await matches(page, "#lock", /true/, "aria-pressed");
  const first = await page.locator("#grid li").nth(1).getAttribute("data-image");
  await page.click("#generate");
  await page.waitForFunction((id) => document.querySelectorAll("#grid li")[2]?.dataset.image === id, first, { timeout: 60_000 });
  const same = await page.evaluate(async (id) => {
    const pixels = async (id) => {
      const image = await createImageBitmap(await (await fetch(`/v1/pictures/${id}/file`)).blob());
      const canvas = new OffscreenCanvas(image.width, image.height);
      canvas.getContext("2d").drawImage(image, 0, 0);
      return canvas.getContext("2d").getImageData(0, 0, image.width, image.height).data.join();
    };
    return (await pixels(id)) === (await pixels(document.querySelector("#grid li").dataset.image));
  }, first);
  assert.ok(same, "the same settings give the same image");

  await page.waitForSelector("#working", { state: "hidden" });
  await page.locator("#grid .open").nth(0).click();
  await page.click("#viewer-actions button:text('Use as reference')");
  await page.waitForSelector("#references li");
  await page.click("#references [aria-label='Remove reference 1']");

  const count = await page.locator("#grid li").count();
  await page.locator("#grid .open").nth(0).click();
  await page.click("#viewer-actions .danger");
  await page.waitForFunction((n) => document.querySelectorAll("#grid li").length === n - 1, count);
  await page.keyboard.press("Escape");
});

test("errors are shown", async (page) => {
  await page.fill("#prompt", "a cat");
  for (const side of ["width", "height"]) await page.fill(`#${side}-number`, "4096");
  await visible(page, "#size-note");
  await page.click("#generate");
  await page.waitForSelector("#alert:not([hidden])");
  await matches(page, "#alert-text", /4096x4096 is too large/);
  await shot(page, "error");
  await page.click("#presets button:text('Square')");
  await generate(page, "a cat");
  // The next success hides the error.
  await hidden(page, "#alert");
});

test("seeds are rolled and locked", async (page) => {
  await page.locator("#dice").click();
  await matches(page, "#seed", /^\d+$/);
  const seed = await page.inputValue("#seed");
  await page.locator("h1").click();
  if ((await page.getAttribute("#lock", "aria-pressed")) === "true") await page.keyboard.press("l");
  await page.keyboard.press("d");
  await page.waitForFunction((before) => document.querySelector("#seed").value !== before, seed);
  await page.keyboard.press("l");
  await matches(page, "#lock", /true/, "aria-pressed");
  await page.fill("#seed", "18446744073709551615");
  const sent = submitted(page);
  await generate(page, "a cat");
  assert.match((await sent).postData(), /"seed":18446744073709551615\}/, "no digit is lost");
  await page.keyboard.press("?");
});

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
  await matches(page, "#viewer-facts", /power, rho 1\.5/);
  await page.click("#viewer-actions button:text('Reuse settings')");
  await matches(page, "#prompt", /^a hat$/);
  for (const [id, value] of [["rng", "cuda"], ["schedule", "power"], ["rho", "1.5"], ["max-tokens", "32"], ["sigmas", ""]]) {
    assert.equal(await page.inputValue(`#${id}`), value);
  }
  await page.reload();
  await page.waitForSelector("[data-ready]");
  assert.equal(await page.inputValue("#sigmas"), "1, 0.5", "the form is saved");
  await page.fill("#sigmas", "");
});

test("the page is accessible in dark and light themes, on a desktop and on a phone", async (page) => {
  for (const theme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const [name, width, height] of [["desktop", 1360, 900], ["phone", 390, 844]]) {
      await page.setViewportSize({ width, height });
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${name}: ${overflow} pixels overflow`);
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      const messages = violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`);
      assert.deepEqual(messages, [], `${theme}, ${name}`);
      await shot(page, `${name}-${theme}`, { fullPage: name === "phone" });
    }
  }
  await page.setViewportSize({ width: 390, height: 844 });
  await page.locator("#grid .open").nth(0).click();
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  await shot(page, "phone-viewer");
  await page.keyboard.press("Escape");
});

test("a server with an API key asks for it", async (page, browser) => {
  const guarded = await startServer("--api-key", "s3cret");
  const context = await browser.newContext();
  try {
    const stranger = await context.newPage();
    await stranger.goto(guarded.address);
    await stranger.waitForSelector("#key-dialog[open]");
    await stranger.fill("#key", "wrong");
    await stranger.keyboard.press("Enter");
    await stranger.waitForSelector("#key-wrong:not([hidden])");
    await stranger.fill("#key", "s3cret");
    await stranger.keyboard.press("Enter");
    await stranger.waitForSelector("[data-ready]");
    await generate(stranger, "a cat");
  } finally {
    await context.close();
    guarded.stop();
  }
});

const server = await startServer();
const browser = await startBrowser();
let failed = 0;
try {
  const context = await browser.newContext({ viewport: { width: 1360, height: 900 }, colorScheme: "dark" });
  // PAGE=FOLDER serves its files instead of the built-in ones, to work on the page.
  if (process.env.PAGE) {
    const file = (name) => join(process.env.PAGE, name);
    await context.route(/\/page\/[^/]+$/, (route) => route.fulfill({ path: file(new URL(route.request().url()).pathname.slice(6)) }));
    await context.route(`${server.address}/`, (route) => route.fulfill({ path: file("index.html") }));
  }
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  // SLOW=10 simulates a processor ten times slower, to find missing waits.
  if (process.env.SLOW) {
    const session = await context.newCDPSession(page);
    await session.send("Emulation.setCPUThrottlingRate", { rate: Number(process.env.SLOW) });
  }
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(server.address);
  await page.waitForSelector("[data-ready]");
  await shot(page, "empty");
  const once = async (run) => {
    // Close dialogs that a failed test left open.
    await page.evaluate(() => document.querySelectorAll("dialog[open]").forEach((d) => d.close()));
    await run(page, browser);
    // The console also lists requests that fail on purpose.
    const unexpected = errors.splice(0).filter((text) => !text.includes("status of 4"));
    assert.deepEqual(unexpected, []);
  };
  for (const { name, run } of tests) {
    try {
      try {
        await once(run);
      } catch (error) {
        // A busy machine may be too slow for a wait: retry once from a fresh page.
        console.log(`retry ${name}\n${error.stack}`);
        await shot(page, `slow-${name.replaceAll(/[^a-z]+/g, "-")}`);
        await fetch(`${server.address}/sdapi/v1/interrupt`, { method: "POST" });
        await page.reload();
        await page.waitForSelector("[data-ready]");
        errors.length = 0;
        await once(run);
      }
      console.log(`ok    ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${name}\n${error.stack}`);
      await shot(page, `failed-${failed}`);
    }
  }
} finally {
  await browser.close();
  server.stop();
}
console.log(`\n${tests.length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
