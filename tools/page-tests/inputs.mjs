// Input images: references, initial image, mask, recipes.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { png } from "./harness.mjs";
import { count, generate, hidden, matches, reload, shot, small, submitted, test, visible, violations } from "./steps.mjs";

const file = (name, colour, side = 128) => ({ name, mimeType: "image/png", buffer: png(side, side, colour) });

/** The level of red of an uploaded image at points between 0 and 1. */
const levels = (page, id, points) => page.evaluate(async ([id, points]) => {
  const image = await createImageBitmap(await (await fetch(`/v1/inputs/${id.slice(6)}`)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return points.map(([x, y]) => context.getImageData(x * image.width, y * image.height, 1, 1).data[0]);
}, [id, points]);

async function removeReferences(page) {
  while (await page.locator("#references li").count()) await page.click("#references [aria-label='Remove reference 1']");
}

test("reference images are added, reordered, sent, and survive a reload", async (page) => {
  await page.setInputFiles("#files", [file("red.png", [200, 30, 30]), file("green.png", [30, 160, 60], 192)]);
  await count(page, "#references li", 2);
  await page.click("[aria-label='Move reference 2 up']");
  await matches(page, "#references li:first-child img", /green/, "alt");
  await shot(page, "references");
  await reload(page);
  await count(page, "#references li", 2);
  await matches(page, "#references li:first-child img", /green/, "alt");
  await page.click("#source-size");
  assert.equal(await page.inputValue("#width-number"), "192", "the size of the first reference");
  const sent = submitted(page);
  await generate(page, "make it a whale", 1);
  const body = (await sent).postDataJSON();
  assert.equal(body.references.length, 2);
  assert.ok((await levels(page, body.references[0], [[0.5, 0.5]]))[0] < 100, "the green image is first");
  await small(page);
  await removeReferences(page);
});

test("input images have a line about their origin", async (page) => {
  await page.setInputFiles("#files", [file("red.png", [200, 30, 30])]);
  await matches(page, "#references .origin", /AI mark: none; credentials: none/);
  await page.click("#references >> text=Use as initial image");
  await matches(page, "#initial-origin", /AI mark: none; credentials: none/);
  await page.click("#initial-to-reference");
  await removeReferences(page);
});

test("a file that can't be used is named", async (page) => {
  await page.setInputFiles("#files", { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("not an image") });
  await matches(page, ".alert-text", /“notes\.txt” can't be used: it is not an image/);
  await page.setInputFiles("#files", { name: "broken.png", mimeType: "image/png", buffer: Buffer.from("not a PNG") });
  await matches(page, ".alert-text", /“broken\.png” can't be used/);
  await page.click(".alert-close");
  await count(page, "#references li", 0);
});

test("an image is dragged from the gallery onto the references", async (page) => {
  await page.locator("#grid .open img").first().dragTo(page.locator("#drop"));
  await count(page, "#references li", 1);
  await page.waitForFunction(() => document.querySelector("#references img").naturalWidth >= 128);
  await page.locator("#grid .open img").first().dragTo(page.locator("#search"));
  await page.waitForTimeout(200);
  await count(page, "#references li", 1);
  await removeReferences(page);
});

test("an image with a recipe brings its settings back", async (page) => {
  await page.fill("#seed", "4711");
  await generate(page, "a purple hat", 3);
  const download = page.waitForEvent("download");
  await page.click("#stage-actions a");
  const buffer = readFileSync(await (await download).path());
  await page.fill("#prompt", "something else");
  await page.click("#lock");
  await page.setInputFiles("#files", { name: "hat.png", mimeType: "image/png", buffer });
  await matches(page, ".toast-text", /hat\.png.*settings/);
  await page.click(".toast-action");
  await matches(page, "#prompt", /^a purple hat$/);
  assert.deepEqual([await page.inputValue("#seed"), await page.inputValue("#steps-number")], ["4711", "3"]);
  await matches(page, "#lock", /true/, "aria-pressed");
  await page.click("#lock");
  await removeReferences(page);
});

test("a hostile recipe runs nothing, and the page tells what is wrong with it", async (page) => {
  const attack = `"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e\0`;
  const name = "<img src=x onerror=window.hacked=1>";
  const recipe = {
    kiln: attack, prompt: attack, negative_prompt: attack, original_prompt: attack, seed: 18446744073709551615n, index: 0, batch: 1,
    width: 4294967280, height: 16, steps: 1000000000, guidance: 1e30, loras: [{ name, weight: 1e30 }],
    model: { path: attack, variant: attack, transformer: attack }, vae: { path: attack }, dtype: attack, backend: attack,
    references: [{ path: name, sha256: attack }],
  };
  const json = (value) => JSON.stringify(value, (_, v) => (typeof v === "bigint" ? `#${v}#` : v)).replaceAll(/"#(\d+)#"/g, "$1");
  const add = (name, text) => page.setInputFiles("#files", { name, mimeType: "image/png", buffer: png(64, 64, [9, 9, 9], text) });
  const use = async (text) => {
    await add(`${name}.png`, text);
    await matches(page, ".toast-text", /holds the settings/);
    await page.click(".toast-action");
  };
  await use(json(recipe));
  await matches(page, ".toast-text", /Settings restored, without .*onerror/);
  assert.ok((await page.inputValue("#prompt")).includes("<script>"), "the prompt is text");
  // The numbers are beyond every limit: the form says so, and nothing is sent.
  assert.ok(await page.locator("#form :invalid:not(fieldset)").count());
  await page.click("#generate");
  await page.waitForTimeout(200);
  await hidden(page, "#working");
  for (const [text, words] of [
    [json({ ...recipe, prompt: "x".repeat(900_000) }), /a prompt of 900000 bytes; the limit is 8000/],
    [json({ ...recipe, width: -1 }), /nvalid recipe/],
    [json({ ...recipe, sigmas: [1e300, -1e300] }), /nvalid recipe/],
    ["[".repeat(500_000), /nvalid recipe/],
    [attack, /nvalid recipe/],
  ]) {
    await use(text);
    await matches(page, ".alert-text", words);
    assert.ok((await page.textContent(".alert-text")).length < 600);
    await page.click(".alert-close");
  }
  await add("large.png", "x".repeat(3 << 20));
  await matches(page, ".alert-text", /settings in “large\.png” can't be used: the recipe is damaged or longer than 1 MiB/);
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.equal(await page.locator("img[src='x'], script:not([src])").count(), 0);
  await page.click(".alert-close");
  await page.evaluate(() => localStorage.removeItem("kiln.inputs"));
  await reload(page);
  await small(page);
});

test("a mask is painted, feathered, undone, redone, zoomed and sent", async (page) => {
  await page.setInputFiles("#files", { ...file("wall.png", [220, 40, 40]) });
  await page.click("#references button:text('Use as initial image')");
  await page.click("#paint-mask");
  await visible(page, "#mask-board");
  const board = page.locator("#mask-board");
  const at = async (x, y) => {
    const box = await board.boundingBox();
    return [box.x + box.width * x, box.y + box.height * y];
  };
  await page.mouse.move(...(await at(0.3, 0.4)));
  await page.mouse.down();
  for (const x of [0.4, 0.5, 0.6, 0.7]) await page.mouse.move(...(await at(x, 0.4 + (x - 0.3) / 2)));
  await page.mouse.up();
  await shot(page, "mask");
  assert.deepEqual(await violations(page), []);
  await page.keyboard.press("Control+z");
  await page.waitForSelector("#mask-undo:disabled");
  await page.keyboard.press("Control+Shift+Z");
  await page.waitForSelector("#mask-redo:disabled");
  const width = (await board.boundingBox()).width;
  await page.click("#mask-in");
  await matches(page, "#mask-zoom", /150 %/);
  assert.ok((await board.boundingBox()).width > width * 1.4);
  // With the keyboard alone: a dot in the middle of the lower right quarter.
  await board.focus();
  await page.keyboard.press(" ");
  await page.click("#mask-done");
  await visible(page, "#remove-mask");
  await page.fill("#feather", "16");
  await page.dispatchEvent("#feather", "input");
  await reload(page);
  await visible(page, "#remove-mask");
  assert.equal(await page.inputValue("#feather"), "16", "the mask survives a reload");
  let sent = submitted(page);
  await generate(page, "a yellow star", 2);
  const soft = (await sent).postDataJSON().mask;
  await page.fill("#feather", "0");
  await page.dispatchEvent("#feather", "input");
  sent = submitted(page);
  await generate(page, "a yellow star", 2);
  const body = (await sent).postDataJSON();
  assert.ok(body.init && body.mask && body.strength > 0);
  assert.ok(!("width" in body), "a masked image keeps its size");
  assert.deepEqual(await levels(page, body.mask, [[0.5, 0.5], [0.05, 0.95]]), [255, 0], "white inside the brush stroke, black outside");
  const count_ = async (id) => {
    const grid = Array.from({ length: 4096 }, (_, i) => [(i % 64) / 64, Math.floor(i / 64) / 64]);
    return (await levels(page, id, grid)).filter((level) => level > 8 && level < 247).length;
  };
  const [hard, feathered] = [await count_(body.mask), await count_(soft)];
  assert.ok(feathered > hard + 50, `${feathered} grey points with soft edges, ${hard} without`);
  await shot(page, "masked");
  await page.click("#initial-to-reference");
  await removeReferences(page);
});
