// What the user gave to the page stays: no error of the server or the network deletes it.

import assert from "node:assert/strict";

import { openPage, png, startServer } from "./harness.mjs";
import { count, hidden, matches, occupy, reload, shot, submit, submitted, test, visible } from "./steps.mjs";
import { file, fill, open, signIn } from "./trainings.mjs";

const KEY = "a-secret-of-16-letters";
const captions = (page) => page.locator("#train-images textarea").evaluateAll((all) => all.map((field) => field.value));
/** Waits until all images of a list are shown. */
const loaded = (page, selector, n) => page.waitForFunction(
  ([selector, n]) => [...document.querySelectorAll(selector)].filter((image) => image.naturalWidth > 0).length === n, [selector, n]);
/** Answers like a server that has no time. */
const busy = (route) => route.fulfill({ status: 503, contentType: "application/json", body: '{"error":{"code":"busy","message":"too busy"}}' });

test("images and captions of a training survive a sign-out and a server without time", async (_, { browser }) => {
  const { page, close } = await open(browser, "--api-key", KEY);
  try {
    await fill(page, "kept", 5);
    await page.fill("#train-images li:nth-child(2) textarea", "a hen, half typed");
    await page.fill("#train-steps", "77");
    await page.locator("#train .close").click();
    await page.click("#sign-out");
    // The images are asked for without a session.
    await page.waitForSelector("#key-dialog[open]");
    await page.waitForTimeout(1500);
    await page.screenshot();
    await signIn(page, KEY);
    await page.waitForSelector("[data-ready]");
    await page.click("#train-open");
    await count(page, "#train-images li", 2);
    assert.deepEqual(await captions(page), ["a fox on orange", "a hen, half typed"]);
    await loaded(page, "#train-images img", 2);
    await matches(page, "#train-steps", /^77$/);
    let refused = 0;
    await page.route("**/v1/inputs/*", (route) => (refused++ < 6 ? busy(route) : route.continue()));
    await reload(page);
    await page.click("#train-open");
    await page.waitForTimeout(1000);
    await count(page, "#train-images li", 2);
    assert.deepEqual(await captions(page), ["a fox on orange", "a hen, half typed"]);
    assert.ok(refused > 0);
    await loaded(page, "#train-images img", 2);
  } finally {
    await close();
  }
});

test("an image that the server no longer has keeps its caption, and its place when it is added again", async (_, { browser }) => {
  const { page, close } = await open(browser);
  try {
    await fill(page, "gone", 3);
    await page.fill("#train-images li:nth-child(2) textarea", "a hen");
    await page.route("**/v1/inputs/*", (route) => route.fulfill({ status: 404, contentType: "application/json", body: '{"error":{"code":"not_found","message":"no input"}}' }));
    await reload(page);
    await page.click("#train-open");
    await count(page, "#train-images .gone:not([hidden])", 2);
    assert.deepEqual(await captions(page), ["a fox on orange", "a hen"]);
    await page.click("#train-start");
    await matches(page, ".alert-text", /No longer on the server: “fox\.png”, “hen\.png”\. Add the files again/);
    await shot(page, "train-gone");
    await page.click(".alert-close");
    await page.unroute("**/v1/inputs/*");
    await page.setInputFiles("#train-files", [file("hen.png", [240, 230, 200]), file("fox.png", [200, 90, 20])]);
    await count(page, "#train-images .gone:not([hidden])", 0);
    await loaded(page, "#train-images img", 2);
    assert.deepEqual(await captions(page), ["a fox on orange", "a hen"]);
    // Removing all of them can be undone.
    await page.click("#train-clear");
    await count(page, "#train-images li", 0);
    await page.click(".toast-action");
    await count(page, "#train-images li", 2);
    assert.deepEqual(await captions(page), ["a fox on orange", "a hen"]);
  } finally {
    await close();
  }
});

test("a caption stays while further images arrive, and in both windows", async (_, { browser }) => {
  const { page, server, close } = await open(browser);
  try {
    await page.click("#train-open");
    await visible(page, "#train-form");
    await page.setInputFiles("#train-files", [file("one.png", [1, 2, 3])]);
    await count(page, "#train-images li", 1);
    const other = await openPage(page.context(), server.address);
    await other.waitForSelector("[data-ready]");
    await other.click("#train-open");
    await count(other, "#train-images li", 1);
    await page.bringToFront();
    await page.focus("#train-images textarea");
    await page.keyboard.type("typed bef");
    await page.setInputFiles("#train-files", [file("two.png", [4, 5, 6]), file("three.png", [7, 8, 9])]);
    await count(page, "#train-images li", 3);
    assert.ok(await page.evaluate(() => document.activeElement.matches("#train-images li:first-child textarea")), "the field keeps the focus");
    await page.keyboard.type("ore");
    await count(other, "#train-images li", 3);
    await other.waitForFunction(() => document.querySelector("#train-images textarea").value === "typed before");
    await other.setInputFiles("#train-files", [file("four.png", [10, 11, 12])]);
    await count(page, "#train-images li", 4);
    assert.deepEqual(await captions(page), ["typed before", "", "", ""]);
  } finally {
    await close();
  }
});

test("input images, their mask and a typed prompt survive a reload at a server without time", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 } });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    const image = (name, colour) => ({ name, mimeType: "image/png", buffer: png(64, 64, colour) });
    await page.setInputFiles("#files", [image("a.png", [200, 0, 0]), image("b.png", [0, 200, 0])]);
    await count(page, "#references li", 2);
    await page.locator("#references button", { hasText: "Use as initial image" }).first().click();
    await page.click("#paint-mask");
    await page.click("#mask-board");
    await page.click("#mask-done");
    await visible(page, "#remove-mask");
    await page.fill("#prompt", "typed and not sent");
    // The mask is shown before it is saved.
    await page.waitForFunction(() => JSON.parse(localStorage.getItem("kiln.inputs")).mask?.id);
    const state = () => page.evaluate(() => {
      const { references, initial, mask } = JSON.parse(localStorage.getItem("kiln.inputs"));
      return JSON.stringify([references.map(({ id }) => id), initial?.id, mask?.id]);
    });
    const before = await state();
    let refused = 0;
    await page.route("**/v1/inputs/*", (route) => (refused++ < 8 ? busy(route) : route.continue()));
    await reload(page);
    await page.waitForTimeout(1000);
    assert.equal(await state(), before, "nothing is deleted");
    assert.equal(await page.inputValue("#prompt"), "typed and not sent");
    await loaded(page, "#references img, #initial-image", 2);
    await visible(page, "#initial-mask");
    assert.equal(await state(), before);
    // One that is really gone is said to be, and is not sent.
    await page.unroute("**/v1/inputs/*");
    await page.route("**/v1/inputs/*", (route) => route.fulfill({ status: 404 }));
    await reload(page);
    await matches(page, "#references .gone", /“b\.png” is no longer on the server/);
    await visible(page, "#initial-gone");
    await page.click("#generate");
    await matches(page, "#alerts", /2 input images are no longer on the server/);
    await shot(page, "inputs-gone");
    await page.unroute("**/v1/inputs/*");
    await page.setInputFiles("#files", [image("b.png", [0, 200, 0]), image("a.png", [200, 0, 0])]);
    await hidden(page, "#initial-gone");
    await loaded(page, "#references img, #initial-image", 2);
    await count(page, "#references li", 1);
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a mask that can't be saved stays on the page, and goes with the job", async (_, { browser, server }) => {
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 } });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await page.setInputFiles("#files", [{ name: "a.png", mimeType: "image/png", buffer: png(64, 64, [200, 0, 0]) }]);
    await page.locator("#references button", { hasText: "Use as initial image" }).first().click();
    await page.route("**/v1/inputs", (route) => route.fulfill({ status: 507, contentType: "application/json", body: '{"error":{"code":"storage","message":"the disk is full"}}' }));
    await page.click("#paint-mask");
    await page.click("#mask-board");
    await page.click("#mask-done");
    await matches(page, ".alert-text", /The disk is full/);
    await visible(page, "#initial-mask");
    await page.unroute("**/v1/inputs");
    const sent = submitted(page);
    await submit(page, "a star", 2);
    assert.match((await sent).postDataJSON().mask, /^input:/);
    await page.waitForSelector("#grid li");
    await hidden(page, "#working");
  } finally {
    await context.close();
  }
});

test("signing out asks first while images are uploaded", async (_, { browser }) => {
  const { page, close } = await open(browser, "--api-key", KEY);
  try {
    let release;
    const held = new Promise((resolve) => (release = resolve));
    await page.route("**/v1/inputs", async (route) => {
      await held;
      await route.continue();
    });
    await page.setInputFiles("#files", [file("late.png", [1, 2, 3])]);
    await matches(page, "#inputs-status", /Uploading “late\.png”/);
    await page.click("#sign-out");
    await matches(page, ".toast-text", /still being uploaded/);
    release();
    await count(page, "#references li", 1);
    await hidden(page, "#key-dialog");
  } finally {
    await close();
  }
});

test("windows in the background hold no connection, and show the end of a job", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const hide = (page) => page.addInitScript(() => Object.defineProperty(document, "hidden", { get: () => true }));
    const front = await openPage(context, server.address);
    await front.waitForSelector("[data-ready]");
    await occupy(front, "a slow boat");
    // A browser has six connections to a server.
    const others = [];
    for (let i = 0; i < 7; i++) others.push(await openPage(context, server.address, hide));
    for (const page of others) await page.waitForSelector("[data-ready]");
    await visible(others[6], "#working");
    const status = await front.evaluate(() => fetch("/v1/about", { signal: AbortSignal.timeout(8000) }).then((answer) => answer.status));
    assert.equal(status, 200);
    await visible(front, "#working");
    await front.click("#cancel");
    for (const page of [front, others[0], others[6]]) await hidden(page, "#working");
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a job is followed on, although the server has no time for a while", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    let refused = 0;
    await page.route(/\/v1\/jobs\/\w+(\/events.*)?$/, (route) => (refused++ < 9 ? busy(route) : route.continue()));
    await submit(page, "a cat", 20);
    await page.waitForSelector("#grid li", { timeout: 60_000 });
    await hidden(page, "#working");
    assert.equal(await page.locator(".alert-text").count(), 0);
    assert.ok(refused > 5, `${refused}`);
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a page that is opened at a server without time is complete when it has some", async (_, { browser, server }) => {
  const context = await browser.newContext();
  try {
    let refused = 0;
    const page = await openPage(context, server.address, (page) =>
      page.route(/\/v1\/(models|queue|images.*)$/, (route) => (refused++ < 14 ? busy(route) : route.continue())));
    await page.fill("#prompt", "typed while it loads");
    await page.waitForSelector("[data-ready]");
    await page.waitForFunction(() => document.querySelector("#model").value && document.querySelectorAll("#grid li").length);
    assert.equal(await page.inputValue("#prompt"), "typed while it loads");
    await hidden(page, "#alerts .alert");
  } finally {
    await context.close();
  }
});
