// Desktop and phone, dark and light, keyboard only, installed.

import assert from "node:assert/strict";

import { openPage } from "./harness.mjs";
import { generate, isInView, matches, running, shot, submit, test, violations, visible } from "./steps.mjs";

test("the page is accessible in dark and light themes, on a desktop and on a phone", async (page) => {
  for (const theme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const [name, width, height] of [["desktop", 1360, 900], ["phone", 390, 844]]) {
      await page.setViewportSize({ width, height });
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${name}: ${overflow} pixels overflow`);
      await page.locator("#grid input").nth(0).check();
      assert.deepEqual(await violations(page), [], `${theme}, ${name}`);
      await page.locator("#grid input").nth(0).uncheck();
      await shot(page, `${name}-${theme}`, { fullPage: name === "phone" });
    }
  }
  await page.setViewportSize({ width: 390, height: 844 });
  for (const [opener, dialog] of [["#grid .open", "#viewer"], ["#help", "#shortcuts"], ["#models-open", "#models"], ["#plot-open", "#plot-dialog"]]) {
    await page.locator(opener).first().click();
    await visible(page, dialog);
    assert.deepEqual(await violations(page), [], dialog);
    const overflow = await page.evaluate((dialog) => document.querySelector(dialog).getBoundingClientRect().right - innerWidth, dialog);
    assert.ok(overflow <= 0, `${dialog} overflows`);
    if (dialog === "#viewer") await shot(page, "phone-viewer");
    await page.keyboard.press("Escape");
  }
  await page.setViewportSize({ width: 1360, height: 900 });
});

test("everything fits on the narrowest phone", async (_, { browser, server }) => {
  const context = await browser.newContext({ viewport: { width: 320, height: 640 } });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    // As on a server with keys that trains, with a long queue.
    await page.evaluate(() => {
      for (const id of ["train-open", "sign-out"]) document.getElementById(id).hidden = false;
      document.getElementById("train-open").textContent = "Train 100 %";
      document.getElementById("queue-status").textContent = "123 jobs";
    });
    await shot(page, "narrow");
    const wide = await page.evaluate(() => [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && e.getBoundingClientRect().right > innerWidth).map((e) => e.id || e.tagName));
    assert.deepEqual(wide, []);
    assert.deepEqual(await violations(page), []);
  } finally {
    await context.close();
  }
});

test("on a phone the image is in sight while it is generated, and after", async (_, { browser, server }) => {
  const context = await browser.newContext({ viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true, colorScheme: "light" });
  try {
    const page = await openPage(context, server.address);
    await page.waitForSelector("[data-ready]");
    await page.evaluate(() => document.querySelector("#steps-number").scrollIntoView());
    await submit(page, "a phone", 60);
    await running(page);
    await page.waitForSelector("#image.preview");
    await page.waitForFunction(() => document.querySelector("#figure").getBoundingClientRect().top >= 0);
    assert.ok(await isInView(page, "#figure"), "the preview is in sight");
    assert.ok(await isInView(page, "#cancel"));
    await shot(page, "phone");
    await page.waitForSelector("#image:not(.preview)");
    assert.ok(await isInView(page, "#figure"), "the image is in sight");
    await page.tap("#stage-open");
    await page.tap("#zoom-in");
    await matches(page, "#viewer-image", /scale\(1\.5\)/, "style");
    await page.tap("#viewer .close");
  } finally {
    await context.close();
  }
});

test("an image is generated, starred and deleted with the keyboard alone", async (page) => {
  await page.locator("h1").click();
  await page.keyboard.press("p");
  await page.keyboard.press("Control+a");
  // A retry must not find the image of the first try.
  const prompt = `a keyboard ${Date.now()}`;
  await page.keyboard.type(prompt);
  await page.keyboard.press("Control+Enter");
  const newest = () => matches(page, "#grid li:first-child img", new RegExp(prompt), "alt");
  await newest();
  await page.waitForSelector("#working", { state: "hidden" });
  await page.focus("#stage-open");
  await page.keyboard.press("Enter");
  await visible(page, "#viewer");
  await page.keyboard.press("f");
  await matches(page, "#viewer-star", /true/, "aria-pressed");
  await page.keyboard.press("Delete");
  await page.waitForFunction((prompt) => [...document.querySelectorAll("#grid img")].every((image) => !image.alt.includes(prompt)), prompt);
  await page.keyboard.press("Control+z");
  await newest();
  await page.keyboard.press("Escape");
  await generate(page, "a cat");
});

test("the page can be installed as an app", async (page, { context }) => {
  const session = await context.newCDPSession(page);
  const { errors, data } = await session.send("Page.getAppManifest");
  assert.deepEqual(errors, []);
  const manifest = JSON.parse(data);
  assert.equal(manifest.display, "standalone");
  for (const { src, sizes } of manifest.icons) {
    const width = await page.evaluate(async (src) => {
      const image = new Image();
      image.src = src;
      await image.decode();
      return image.naturalWidth;
    }, src);
    if (sizes !== "any") assert.equal(`${width}x${width}`, sizes);
  }
  const { installabilityErrors } = await session.send("Page.getInstallabilityErrors");
  assert.deepEqual(installabilityErrors.map(({ errorId }) => errorId).filter((id) => id !== "in-incognito"), []);
});
