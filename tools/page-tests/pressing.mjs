// Clicks: none is lost because something moves under the pointer, and a double click is not two orders.

import assert from "node:assert/strict";

import { count, generate, hidden, matches, shot, steps, test, visible } from "./steps.mjs";
import { file, fill, open } from "./trainings.mjs";

/** Presses and releases like a person: the press takes the focus from a field, and some time passes. */
async function press(page, selector, meanwhile = async () => {}) {
  const box = await page.locator(selector).boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  await page.mouse.down();
  await meanwhile();
  await page.waitForTimeout(120);
  await page.mouse.up();
}

for (const [name, width, height] of [["desktop", 1200, 900], ["phone", 390, 844]]) {
  test(`leaving a field does not take the click from a button of the training: ${name}`, async (_, { browser }) => {
    const { page, close } = await open(browser);
    try {
      await page.setViewportSize({ width, height });
      await fill(page, "pressed", 3);
      // A caption is missing, until there is a trigger word.
      await visible(page, "#train-uncaptioned-field");
      await page.fill("#train-trigger", "");
      for (const open of [false, true]) {
        await page.locator("#train-settings").scrollIntoViewIfNeeded();
        await page.focus("#train-trigger");
        await page.keyboard.type("z");
        await press(page, "#train-settings");
        assert.equal(await page.evaluate(() => document.querySelector("#train-form details").open), open, "Settings");
        await page.fill("#train-trigger", "");
        await page.press("#train-trigger", "Tab");
        await visible(page, "#train-uncaptioned-field");
      }
      // The answer of the check comes while the button is pressed.
      await page.locator("#train-start").scrollIntoViewIfNeeded();
      await page.focus("#train-trigger");
      await page.keyboard.type("zorp");
      await page.locator("#train-start").scrollIntoViewIfNeeded();
      await press(page, "#train-start");
      await visible(page, "#train-view");
      await hidden(page, "#train-form");
      await matches(page, "#train-status", /Done/);
    } finally {
      await close();
    }
  });
}

test("an image that arrives does not take the click from a button", async (_, { browser }) => {
  const { page, close } = await open(browser);
  try {
    await page.click("#train-open");
    await visible(page, "#train-form");
    await page.setViewportSize({ width: 390, height: 844 });
    await page.setInputFiles("#train-files", [file("one.png", [1, 2, 3])]);
    await count(page, "#train-images li", 1);
    await page.locator("#train-settings").scrollIntoViewIfNeeded();
    let release;
    const held = new Promise((resolve) => (release = resolve));
    await page.route("**/v1/inputs", async (route) => {
      await held;
      await route.continue();
    });
    await page.setInputFiles("#train-files", [2, 3, 4].map((n) => file(`${n}.png`, [n, n, n])));
    await matches(page, "#train-count", /Uploading/);
    const settings = () => page.evaluate(() => document.querySelector("#train-form details").open);
    const before = await settings();
    await press(page, "#train-settings", async () => {
      release();
      await page.waitForTimeout(800);
    });
    assert.equal(await settings(), !before);
    await count(page, "#train-images li", 4);
    await shot(page, "train-images-phone");
  } finally {
    await close();
  }
});

test("a double click on Delete takes one image, and a key that is held down, too", async (page) => {
  for (const prompt of ["a bell", "a hat", "a boat"]) await generate(page, prompt);
  const cards = await page.locator("#grid li").count();
  await page.locator("#grid .open").first().click();
  await visible(page, "#viewer");
  // A person's double click takes longer than the answer.
  const box = await page.locator("#viewer-actions .danger").boundingBox();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  await page.mouse.click(x, y);
  await count(page, "#grid li", cards - 1);
  await page.mouse.move(x, y);
  await page.mouse.down({ clickCount: 2 });
  await page.mouse.up({ clickCount: 2 });
  await page.waitForTimeout(500);
  await count(page, "#grid li", cards - 1);
  for (let i = 0; i < 3; i++) await page.keyboard.down("Delete");
  await page.keyboard.up("Delete");
  await page.waitForTimeout(500);
  await count(page, "#grid li", cards - 2);
  await page.keyboard.press("Escape");
});

test("a double click orders one plot", async (page, { server }) => {
  await page.fill("#prompt", "a lamp");
  await steps(page, 2);
  await page.click("#plot-open");
  await visible(page, "#plot-dialog");
  await page.fill("#x-values", "7");
  await page.selectOption("#y-field", "");
  const plots = async () => (await (await fetch(`${server.address}/v1/plots`)).json()).data.length;
  const before = await plots();
  await page.dblclick("#plot-submit");
  await visible(page, "#plot-view");
  await matches(page, "#plot-status", /^1 image$/);
  assert.equal(await plots(), before + 1);
  await page.keyboard.press("Escape");
  await hidden(page, "#working");
});
