// Messages and connections: a server that does not answer is noticed, and no message replaces another.

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";

import { openPage, png, startServer } from "./harness.mjs";
import { count, generate, hidden, isInView, matches, running, shot, submit, test, violations, visible } from "./steps.mjs";

test("a server that stops answering is noticed, and nothing is lost or done twice", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext({ viewport: { width: 1000, height: 800 }, colorScheme: "dark" });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await generate(page, "a cat");
    server.freeze();
    await submit(page, "a boat", 3);
    await matches(page, "#offline-text", /The server does not answer/);
    await visible(page, "#offline");
    assert.ok(await page.getAttribute("#generate", "aria-busy"), "the button shows that it waits");
    await shot(page, "frozen");
    // A second click while it waits is not a second job, but one with another prompt is.
    await page.click("#generate");
    await submit(page, "a bell", 3);
    await page.setInputFiles("#files", [{ name: "red.png", mimeType: "image/png", buffer: png(64, 64, [200, 0, 0]) }]);
    await matches(page, "#inputs-status", /Uploading “red\.png”/);
    server.thaw();
    await hidden(page, "#offline");
    await count(page, "#grid li", 3);
    await count(page, "#references li", 1);
    await hidden(page, "#working");
    await hidden(page, "#alerts .alert");
    const { data } = await (await fetch(`${server.address}/v1/jobs`)).json();
    assert.deepEqual(data.map(({ request }) => request.prompt).sort(), ["a bell", "a boat", "a cat"]);
  } finally {
    server.thaw();
    await context.close();
    await server.stop();
  }
});

test("a job whose server stops answering says so, and goes on with it", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await page.fill("#count", "8");
    await submit(page, "a slow boat", 200);
    await running(page);
    server.freeze();
    await page.waitForSelector("#offline", { state: "visible", timeout: 60_000 });
    await matches(page, "#working-text", /Connection lost/);
    server.thaw();
    await hidden(page, "#offline");
    await matches(page, "#working-text", /Step/);
    await page.click("#cancel");
    await hidden(page, "#working");
  } finally {
    server.thaw();
    await context.close();
    await server.stop();
  }
});

test("an image that does not come is no silence either", async (_, { browser }) => {
  const server = await startServer();
  const [first, context] = [await browser.newContext(), await browser.newContext()];
  try {
    const other = await openPage(first, server.address);
    await other.waitForSelector("[data-ready]");
    await generate(other, "a cat");
    await first.close();
    // A browser that has not seen the image.
    const page = await openPage(context, server.address);
    await page.waitForFunction(() => document.querySelector("#grid img")?.naturalWidth > 0);
    server.freeze();
    await page.locator("#grid .open").click();
    await visible(page, "#viewer");
    await matches(page, "#offline-text", /The server does not answer/);
    await visible(page, "#viewer #offline");
    server.thaw();
    await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth === 128);
    await hidden(page, "#offline");
  } finally {
    server.thaw();
    await context.close();
    await server.stop();
  }
});

test("a job whose answer is lost on the way is one job", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    let posts = 0;
    await page.route(/\/v1\/jobs\?/, async (route) => {
      posts += 1;
      if (posts > 1) return route.continue();
      await route.fetch();
      return route.abort("connectionreset");
    });
    await submit(page, "a cat", 3);
    await count(page, "#grid li", 1);
    await hidden(page, "#alerts .alert");
    assert.equal(posts, 2);
    const { data } = await (await fetch(`${server.address}/v1/jobs`)).json();
    assert.equal(data.length, 1);
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a slow upload tells its progress and is not given up", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    const session = await context.newCDPSession(page);
    const speed = (uploadThroughput) => session.send("Network.emulateNetworkConditions", { offline: false, latency: 0, downloadThroughput: -1, uploadThroughput });
    await session.send("Network.enable");
    await speed(100_000);
    // Random bytes behind the image: nothing shrinks them.
    const buffer = Buffer.concat([png(64, 64, [200, 0, 0]), randomBytes(1_200_000)]);
    await page.setInputFiles("#files", [{ name: "large.png", mimeType: "image/png", buffer }]);
    await matches(page, "#inputs-status", /Uploading “large\.png”, [1-9]\d* %/);
    // Longer than the server may be silent.
    await page.waitForTimeout(7000);
    await visible(page, "#inputs-status");
    await hidden(page, "#offline");
    await speed(-1);
    await count(page, "#references li", 1);
    await hidden(page, "#alerts .alert");
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a page that goes offline and online again needs no reload", async (_, { browser }) => {
  const server = await startServer();
  const context = await browser.newContext();
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await generate(page, "a cat");
    await context.setOffline(true);
    await matches(page, "#offline-text", /This device is offline/);
    // Meanwhile an image comes from elsewhere.
    const body = JSON.stringify({ prompt: "a bell", steps: 2, width: 128, height: 128 });
    const { id } = await (await fetch(`${server.address}/v1/jobs`, { method: "POST", headers: { "content-type": "application/json" }, body })).json();
    for (let i = 0; i < 300; i++) {
      if ((await (await fetch(`${server.address}/v1/jobs/${id}`)).json()).status === "done") break;
      await page.waitForTimeout(100);
    }
    await context.setOffline(false);
    await hidden(page, "#offline");
    await count(page, "#grid li", 2);
    await page.waitForFunction(() => [...document.querySelectorAll("#grid img")].every((image) => image.naturalWidth > 0));
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a second message does not replace the first", async (page) => {
  const text = (name) => ({ name, mimeType: "text/plain", buffer: Buffer.from("x") });
  await page.setInputFiles("#files", [text("one.txt"), text("two.txt"), text("three.txt"), text("two.txt")]);
  await count(page, "#alerts .alert", 3);
  const shown = await page.locator(".alert-text").allTextContents();
  assert.deepEqual(shown.map((line) => line.match(/“(\w+)\.txt”/)[1]), ["two", "three", "one"], "the newest is first");
  await matches(page, "#alerts", /2 times/);
  for (const [width, height] of [[390, 844], [1360, 900]]) {
    await page.setViewportSize({ width, height });
    await shot(page, `alerts-${width}`);
    for (const id of ["#alerts .alert:last-child", "#alerts-close"]) assert.ok(await isInView(page, id), `${id} at ${width}`);
    assert.deepEqual(await violations(page), []);
  }
  assert.equal(await page.locator("#alerts [role=alert]").count(), 3);
  // With the keyboard, from one to the next.
  await page.locator(".alert-close").first().focus();
  await page.keyboard.press("Enter");
  await count(page, "#alerts .alert", 2);
  assert.ok(await page.evaluate(() => document.activeElement.matches(".alert-close")));
  // A job that succeeds says nothing about them.
  await generate(page, "a cat");
  await count(page, "#alerts .alert", 2);
  await page.click("#alerts-close");
  await count(page, "#alerts .alert", 0);
});

test("a note does not take away the undo of another", async (page) => {
  await generate(page, "a bell");
  await generate(page, "a hat");
  // By their ids: if the gallery has more images than it shows, an undo may show more of them.
  const [hat, bell] = await page.locator("#grid li").evaluateAll((cards) => cards.map((card) => `#grid [data-image="${card.dataset.image}"]`));
  await page.locator("#grid .open").first().click();
  await visible(page, "#viewer");
  for (const card of [hat, bell]) {
    await page.keyboard.press("Delete");
    await count(page, card, 0);
  }
  await count(page, ".toast-action", 2);
  // At once: they go after ten seconds.
  for (const card of [bell, hat]) {
    await page.keyboard.press("Control+z");
    await count(page, card, 1);
  }
  await page.keyboard.press("Escape");
  await count(page, ".toast-action", 0);
});

test("what is wrong with signing in is said, and another window's session is enough", async (_, { browser }) => {
  const server = await startServer("--api-key", "a-secret-of-16-letters");
  const context = await browser.newContext();
  try {
    const [first, second] = [await openPage(context, server.address), await openPage(context, server.address)];
    for (const page of [first, second]) await page.waitForSelector("#key-dialog[open]");
    await first.route("**/v1/session", (route) => route.abort());
    await first.fill("#key", "a-secret-of-16-letters");
    await first.click("#key-submit");
    await matches(first, "#key-wrong", /can't be reached/);
    await first.unroute("**/v1/session");
    await first.dblclick("#key-submit");
    for (const page of [first, second]) await page.waitForSelector("[data-ready]");
    // The session ends in one window; the other asks when it needs it, and goes on where it was.
    await first.click("#sign-out");
    await first.waitForSelector("#key-dialog[open]");
    await submit(second, "a cat", 2);
    await second.waitForSelector("#key-dialog[open]");
    await second.fill("#key", "a-secret-of-16-letters");
    await second.keyboard.press("Enter");
    await count(second, "#grid li", 1);
    await first.waitForSelector("[data-ready]");
  } finally {
    await context.close();
    await server.stop();
  }
});
