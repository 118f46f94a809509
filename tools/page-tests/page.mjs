// What a person does on the page, in a real browser.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

import { png, startBrowser, startServer } from "./kit.mjs";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const shot = (page, name, options) => page.screenshot({ path: join(process.env.SHOTS, `${name}.png`), ...options });
const tests = [];
const test = (name, run) => tests.push({ name, run });

const order = (page) => page.waitForRequest((r) => r.url().endsWith("/v1/jobs") && r.method() === "POST");
const steps = (page, n) => page.fill("#steps-number", String(n)).then(() => page.dispatchEvent("#steps-number", "input"));

/** Waits for what an element says, or for its attribute: the page answers a click when it comes to it. */
const says = (page, selector, pattern, attribute) => page.waitForFunction(
  ([selector, source, attribute]) => {
    const element = document.querySelector(selector);
    return element && new RegExp(source).test(attribute ? element.getAttribute(attribute) : element.value ?? element.textContent);
  },
  [selector, pattern.source, attribute],
);
const shows = (page, selector) => page.waitForSelector(selector, { state: "visible" });
const hides = (page, selector) => page.waitForSelector(selector, { state: "hidden" });

/** Paints with few steps and waits for the picture. */
async function paint(page, prompt, n = 2) {
  await page.fill("#prompt", prompt);
  await steps(page, n);
  const before = await page.locator("#grid li").count();
  await page.click("#generate");
  await page.waitForFunction((count) => document.querySelectorAll("#grid li").length > count, before, { timeout: 60_000 });
  await page.waitForSelector("#working", { state: "hidden", timeout: 60_000 });
}

test("a picture is painted with a live preview, progress and time left", async (page) => {
  await page.fill("#prompt", "a red apple on a blue background");
  await steps(page, 60);
  const before = await page.locator("#grid li").count();
  await page.keyboard.press("Control+Enter");
  await page.waitForSelector("#picture.preview", { timeout: 60_000 });
  await page.waitForFunction(() => /Step \d+ of 60 · about .* left/.test(document.querySelector("#working-text").textContent));
  await page.waitForFunction(() => Number(document.querySelector("#bar").getAttribute("aria-valuenow")) > 40);
  await shot(page, "preview");
  await page.waitForSelector("#picture:not(.preview)", { timeout: 60_000 });
  assert.equal(await page.evaluate(() => document.querySelector("#picture").decode().then(() => document.querySelector("#picture").naturalWidth)), 256);
  await page.waitForFunction((count) => document.querySelectorAll("#grid li").length === count + 1, before);
  await hides(page, "#alert");
  await page.waitForFunction(() => [...document.querySelectorAll("#grid img")].every((i) => i.complete));
  await shot(page, "painted");
});

test("painting is cancelled with a key, and says so", async (page) => {
  await page.fill("#prompt", "a robot");
  await steps(page, 200);
  await page.click("#generate");
  // What the job before said is still in the hidden text.
  await shows(page, "#working");
  await page.waitForFunction(() => /Step \d+/.test(document.querySelector("#working-text").textContent), null, { timeout: 60_000 });
  const began = Date.now();
  await page.keyboard.press("Escape");
  await page.waitForSelector("#working", { state: "hidden" });
  assert.ok(Date.now() - began < 5000);
  const jobs = await page.evaluate(() => fetch("/v1/jobs?limit=1").then((r) => r.json()));
  assert.equal(jobs.data[0].status, "cancelled");
});

test("an order waits behind another and can be taken out", async (page) => {
  await page.fill("#prompt", "a house");
  await steps(page, 200);
  await page.click("#generate");
  await page.waitForSelector("#working:not([hidden])");
  await page.fill("#prompt", "a crown");
  await page.click("#generate");
  await page.waitForSelector("#waiting li");
  await shot(page, "waiting");
  await page.click("#waiting li button");
  await page.waitForSelector("#waiting li", { state: "detached" });
  await page.click("#cancel");
  await page.waitForSelector("#working", { state: "hidden" });
});

test("references are added, put in another order, and sent", async (page) => {
  const files = [["red.png", [200, 30, 30]], ["green.png", [30, 160, 60]]];
  await page.setInputFiles("#files", files.map(([name, colour]) => ({ name, mimeType: "image/png", buffer: png(128, 128, colour) })));
  await page.waitForFunction(() => document.querySelectorAll("#references li").length === 2);
  await page.click("[aria-label='Move reference 2 up']");
  await says(page, "#references li:first-child img", /green/, "alt");
  await shot(page, "references");
  const sent = order(page);
  await paint(page, "make it a whale");
  const body = (await sent).postDataJSON();
  assert.equal(body.references.length, 2);
  const colour = await page.evaluate(async (id) => {
    const image = await createImageBitmap(await (await fetch(`/v1/inputs/${id.slice(6)}`)).blob());
    const canvas = new OffscreenCanvas(1, 1);
    canvas.getContext("2d").drawImage(image, 0, 0);
    return [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data];
  }, body.references[0]);
  assert.ok(colour[1] > colour[0], "the green one goes first");
  const rejected = page.waitForSelector("#alert:not([hidden])");
  await page.setInputFiles("#files", { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("no picture") });
  await rejected;
  await says(page, "#alert-text", /notes\.txt.*not a picture/);
  await page.click("#alert-close");
  for (const _ of files) await page.click("#references [aria-label='Remove reference 1']");
});

test("a mask is painted with the brush and keeps the rest", async (page) => {
  await page.setInputFiles("#files", { name: "wall.png", mimeType: "image/png", buffer: png(256, 256, [220, 40, 40]) });
  await page.click("#references button:text('Start from it')");
  await page.click("#paint-mask");
  await shows(page, "#mask-board");
  const board = page.locator("#mask-board");
  const box = await board.boundingBox();
  const at = (x, y) => [box.x + box.width * x, box.y + box.height * y];
  await page.mouse.move(...at(0.3, 0.4));
  await page.mouse.down();
  for (const x of [0.4, 0.5, 0.6, 0.7]) await page.mouse.move(...at(x, 0.4 + (x - 0.3) / 2));
  await page.mouse.up();
  await shot(page, "mask");
  await page.click("#mask-done");
  await shows(page, "#drop-mask");
  const sent = order(page);
  await paint(page, "a yellow star", 4);
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
  assert.deepEqual(levels, [255, 0], "white where the brush was, black where not");
  await shot(page, "masked");
  await page.click("#canvas-off");
  await page.click("#references [aria-label='Remove reference 1']");
});

test("the gallery is searched, opened, compared, used again and emptied", async (page) => {
  await paint(page, "a rocket");
  await paint(page, "a cat");
  await page.fill("#search", "rocket");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length === 1);
  await page.fill("#search", "no such words");
  await page.waitForFunction(() => document.querySelector("#gallery-empty").textContent.includes("Nothing fits"));
  await page.fill("#search", "");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length > 2);

  await page.locator("#grid input").nth(0).check();
  await page.waitForSelector("#compare:disabled");
  await page.locator("#grid input").nth(1).check();
  await page.click("#compare");
  await page.waitForSelector("#comparison[open]");
  await says(page, "#left-facts", /a rocket/);
  await says(page, "#right-facts", /a cat/);
  await page.waitForFunction(() => [...document.querySelectorAll(".two img")].every((i) => i.complete && i.naturalWidth));
  await shot(page, "comparison");
  await page.click("#swap");
  await says(page, "#left-facts", /a cat/);
  await page.keyboard.press("Escape");

  await page.locator("#grid .open").nth(1).click();
  await page.waitForSelector("#viewer[open]");
  await says(page, "#viewer-facts", /a rocket/);
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  await shot(page, "viewer");
  await page.keyboard.press("ArrowLeft");
  await says(page, "#viewer-facts", /a cat/);
  await page.keyboard.press("ArrowRight");

  const download = page.waitForEvent("download");
  await page.click("#viewer-actions a");
  assert.match((await download).suggestedFilename(), /^a-rocket-\d+\.png$/);

  await page.click("#viewer-actions button:text('Same recipe again')");
  await says(page, "#prompt", /^a rocket$/);
  await says(page, "#lock", /true/, "aria-pressed");
  const first = await page.locator("#grid li").nth(1).getAttribute("data-picture");
  await page.click("#generate");
  await page.waitForFunction((id) => document.querySelectorAll("#grid li")[2]?.dataset.picture === id, first, { timeout: 60_000 });
  const same = await page.evaluate(async (id) => {
    const pixels = async (id) => {
      const image = await createImageBitmap(await (await fetch(`/v1/pictures/${id}/file`)).blob());
      const canvas = new OffscreenCanvas(image.width, image.height);
      canvas.getContext("2d").drawImage(image, 0, 0);
      return canvas.getContext("2d").getImageData(0, 0, image.width, image.height).data.join();
    };
    return (await pixels(id)) === (await pixels(document.querySelector("#grid li").dataset.picture));
  }, first);
  assert.ok(same, "the same recipe gives the same picture");

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

test("what fails is said plainly", async (page) => {
  await page.fill("#prompt", "a cat");
  for (const side of ["width", "height"]) await page.fill(`#${side}-number`, "4096");
  await shows(page, "#size-note");
  await page.click("#generate");
  await page.waitForSelector("#alert:not([hidden])");
  await says(page, "#alert-text", /4096x4096 is too large/);
  await shot(page, "error");
  await page.click("#presets button:text('Square')");
  await paint(page, "a cat");
  // It goes away when something works.
  await hides(page, "#alert");
});

test("seeds are rolled and kept", async (page) => {
  await page.locator("#dice").click();
  await says(page, "#seed", /^\d+$/);
  const seed = await page.inputValue("#seed");
  await page.locator("h1").click();
  if ((await page.getAttribute("#lock", "aria-pressed")) === "true") await page.keyboard.press("l");
  await page.keyboard.press("d");
  await page.waitForFunction((before) => document.querySelector("#seed").value !== before, seed);
  await page.keyboard.press("l");
  await says(page, "#lock", /true/, "aria-pressed");
  await page.fill("#seed", "18446744073709551615");
  const sent = order(page);
  await paint(page, "a cat");
  assert.match((await sent).postData(), /"seed":18446744073709551615\}/, "every digit arrives");
  await page.keyboard.press("?");
});

test("advanced settings are sent, shown, and used again", async (page) => {
  await page.click("#advanced summary");
  await page.selectOption("#rng", "cuda");
  await hides(page, "#rho-field");
  await page.selectOption("#schedule", "power");
  await shows(page, "#rho-field");
  await page.fill("#rho", "1.5");
  await page.fill("#max-tokens", "32");
  // The server has no autoencoders to choose from.
  await hides(page, "#vae-field");
  await shot(page, "advanced");
  let sent = order(page);
  await paint(page, "a hat");
  let body = (await sent).postDataJSON();
  assert.deepEqual([body.rng, body.schedule, body.rho, body.max_tokens], ["cuda", "power", 1.5, 32]);
  assert.ok(!("sigmas" in body) && !("vae" in body), "what is empty is left to the model");

  await page.selectOption("#rng", "");
  await page.selectOption("#schedule", "");
  await page.fill("#max-tokens", "");
  await page.fill("#sigmas", "1, 0.5");
  sent = order(page);
  await paint(page, "a glove");
  body = (await sent).postDataJSON();
  assert.deepEqual(body.sigmas, [1, 0.5]);
  assert.ok(!("rho" in body), "rho goes with its schedule");

  await page.locator("#grid .open").nth(1).click();
  await page.waitForSelector("#viewer[open]");
  await says(page, "#viewer-facts", /power, rho 1\.5/);
  await page.click("#viewer-actions button:text('Same recipe again')");
  await says(page, "#prompt", /^a hat$/);
  for (const [id, value] of [["rng", "cuda"], ["schedule", "power"], ["rho", "1.5"], ["max-tokens", "32"], ["sigmas", ""]]) {
    assert.equal(await page.inputValue(`#${id}`), value);
  }
  await page.reload();
  await page.waitForSelector("[data-ready]");
  assert.equal(await page.inputValue("#sigmas"), "1, 0.5", "the form is kept");
  await page.fill("#sigmas", "");
});

test("labels, contrast and roles are as they should be, in dark and light, on a desk and on a phone", async (page) => {
  for (const theme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const [name, width, height] of [["desk", 1360, 900], ["phone", 390, 844]]) {
      await page.setViewportSize({ width, height });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${name}: ${wide} pixels stick out`);
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      const said = violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`);
      assert.deepEqual(said, [], `${theme}, ${name}`);
      await shot(page, `${name}-${theme}`, { fullPage: name === "phone" });
    }
  }
  await page.setViewportSize({ width: 390, height: 844 });
  await page.locator("#grid .open").nth(0).click();
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  await shot(page, "phone-viewer");
  await page.keyboard.press("Escape");
});

test("a key is asked for where one is needed", async (page, browser) => {
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
    await paint(stranger, "a cat");
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
  // With PAGE=FOLDER, its files instead of those inside the program: for work on the page.
  if (process.env.PAGE) {
    const file = (name) => join(process.env.PAGE, name);
    await context.route(/\/page\/[^/]+$/, (route) => route.fulfill({ path: file(new URL(route.request().url()).pathname.slice(6)) }));
    await context.route(`${server.address}/`, (route) => route.fulfill({ path: file("index.html") }));
  }
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  // With SLOW=10, a processor ten times slower: what the tests don't wait for, they then miss.
  if (process.env.SLOW) {
    const session = await context.newCDPSession(page);
    await session.send("Emulation.setCPUThrottlingRate", { rate: Number(process.env.SLOW) });
  }
  const trouble = [];
  page.on("pageerror", (error) => trouble.push(error.message));
  page.on("console", (message) => message.type() === "error" && trouble.push(message.text()));
  await page.goto(server.address);
  await page.waitForSelector("[data-ready]");
  await shot(page, "empty");
  const once = async (run) => {
    // One that left the page in disorder does not spoil the next.
    await page.evaluate(() => document.querySelectorAll("dialog[open]").forEach((d) => d.close()));
    await run(page, browser);
    // Requests that are refused on purpose are in the console, too.
    const unforeseen = trouble.splice(0).filter((text) => !text.includes("status of 4"));
    assert.deepEqual(unforeseen, []);
  };
  for (const { name, run } of tests) {
    try {
      try {
        await once(run);
      } catch (error) {
        // A machine that is busy with other things may be too slow for one of the waits: once more, from a fresh page.
        console.log(`again ${name}\n${error.stack}`);
        await shot(page, `slow-${name.replaceAll(/[^a-z]+/g, "-")}`);
        await fetch(`${server.address}/sdapi/v1/interrupt`, { method: "POST" });
        await page.reload();
        await page.waitForSelector("[data-ready]");
        trouble.length = 0;
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
