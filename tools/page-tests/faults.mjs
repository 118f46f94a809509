// What goes wrong: errors are in sight, and a server that goes away is noticed.

import assert from "node:assert/strict";

import { openPage, startServer } from "./harness.mjs";
import { generate, hidden, isInView, matches, running, shot, small, submit, test, visible } from "./steps.mjs";

test("errors are in sight, wherever the page is scrolled to", async (page) => {
  await page.setViewportSize({ width: 1360, height: 500 });
  await page.fill("#prompt", "a cat");
  for (const side of ["width", "height"]) await page.fill(`#${side}-number`, "4096");
  await visible(page, "#size-note");
  await page.evaluate(() => scrollTo(0, document.body.scrollHeight));
  await page.keyboard.press("Control+Enter");
  await visible(page, "#alerts .alert");
  await matches(page, ".alert-text", /4096x4096 is too large/);
  assert.ok(await isInView(page, "#alerts .alert"));
  await shot(page, "error");
  await page.evaluate(() => scrollTo(0, 0));
  await page.setViewportSize({ width: 1360, height: 900 });
  // In a dialog, too, and it can be closed there.
  await page.locator("#grid .open").nth(0).click();
  assert.ok(await isInView(page, "#alerts .alert"));
  await page.click(".alert-close");
  await hidden(page, "#alerts .alert");
  await page.keyboard.press("Escape");
  await page.click("#generate");
  await visible(page, "#alerts .alert");
  await small(page);
  await generate(page, "a cat");
  // The next success hides the error.
  await hidden(page, "#alerts .alert");
});

test("a server that goes away is noticed, and its jobs continue when it is back", async (_, { browser }) => {
  let server = await startServer();
  const context = await browser.newContext({ viewport: { width: 1000, height: 800 } });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await submit(page, "a slow cat", 150);
    await running(page);
    await server.kill();
    await visible(page, "#offline");
    await matches(page, "#working-text", /Connection lost/);
    assert.equal(await page.title(), "Kiln", "the title shows no frozen progress");
    await shot(page, "offline");
    await page.click("#generate");
    await matches(page, ".alert-text", /can't be reached/);
    server = await server.restart();
    await hidden(page, "#offline");
    await matches(page, "#working-text", /Step|Queued|Loading/);
    await page.waitForSelector("#image:not(.preview)", { timeout: 60_000, state: "visible" });
    await hidden(page, "#working");
  } finally {
    await context.close();
    await server.stop();
  }
});

test("a server with an API key asks for it", async (_, { browser }) => {
  const guarded = await startServer("--api-key", "a-secret-of-16-letters");
  const context = await browser.newContext();
  try {
    const stranger = await openPage(context, guarded.address);
    await stranger.waitForSelector("#key-dialog[open]");
    await stranger.fill("#key", "wrong");
    await stranger.keyboard.press("Enter");
    await stranger.waitForSelector("#key-wrong:not(:empty)");
    await stranger.fill("#key", "a-secret-of-16-letters");
    await stranger.keyboard.press("Enter");
    await stranger.waitForSelector("[data-ready]");
    await generate(stranger, "a cat");
    await stranger.click("#sign-out");
    await stranger.waitForSelector("#key-dialog[open]");
    await hidden(stranger, "#sign-out");
  } finally {
    await context.close();
    await guarded.stop();
  }
});
