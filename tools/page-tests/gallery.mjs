// The gallery: search, selection, favourites, trash; the viewer and the comparison.

import assert from "node:assert/strict";

import { openPage } from "./harness.mjs";
import { count, generate, matches, reload, shot, test, visible } from "./steps.mjs";

const first = (page) => page.locator("#grid li").first();
const size = (page) => page.locator("#grid li").count();

/** Generates images until there are this many, and empties the trash that a failed attempt may have left. */
async function prepare(page, { address }, number) {
  while ((await size(page)) < number) await generate(page, "a pear");
  const { data } = await (await fetch(`${address}/v1/images?trash=true`)).json();
  for (const { id } of data) await fetch(`${address}/v1/images/${id}`, { method: "DELETE" });
}

test("images are searched, viewed, downloaded and reused", async (page, { server }) => {
  await prepare(page, server, 1);
  await generate(page, "a rocket");
  await generate(page, "a cat");
  await page.fill("#search", "rocket");
  await count(page, "#grid li", 1);
  await page.fill("#search", "no such words");
  await matches(page, "#gallery-empty", /No matching images/);
  await page.fill("#search", "");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length > 2);

  await page.locator("#grid .open").nth(1).click();
  await page.waitForSelector("#viewer[open]");
  await matches(page, "#viewer-facts", /a rocket/);
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  await shot(page, "viewer");
  await page.keyboard.press("ArrowLeft");
  await matches(page, "#viewer-facts", /a cat/);
  await page.keyboard.press("ArrowRight");
  await matches(page, "#viewer-facts", /a rocket/);

  const download = page.waitForEvent("download");
  await page.click("#viewer-actions a");
  assert.match((await download).suggestedFilename(), /^a-rocket-\d+\.png$/);

  await page.click("#viewer-actions button:text('Reuse settings')");
  await matches(page, "#prompt", /^a rocket$/);
  await matches(page, "#lock", /true/, "aria-pressed");
  const rocket = await page.locator("#grid li").nth(1).getAttribute("data-image");
  await page.click("#generate");
  await page.waitForFunction((id) => document.querySelectorAll("#grid li")[2]?.dataset.image === id, rocket, { timeout: 60_000 });
  const same = await page.evaluate(async (id) => {
    const pixels = async (id) => {
      const image = await createImageBitmap(await (await fetch(`/v1/images/${id}/file`)).blob());
      const canvas = new OffscreenCanvas(image.width, image.height);
      canvas.getContext("2d").drawImage(image, 0, 0);
      return canvas.getContext("2d").getImageData(0, 0, image.width, image.height).data.join();
    };
    return (await pixels(id)) === (await pixels(document.querySelector("#grid li").dataset.image));
  }, rocket);
  assert.ok(same, "the same settings give the same image");
  await page.waitForSelector("#working", { state: "hidden" });
  await page.click("#lock");

  await page.locator("#grid .open").nth(0).click();
  await page.click("#viewer-actions button:text('Use as reference')");
  await page.waitForSelector("#references li");
  await page.click("#references [aria-label='Remove reference 1']");
});

test("the viewer zooms and pans with wheel, pointer, buttons and keys", async (page) => {
  await page.locator("#grid .open").nth(0).click();
  await page.waitForFunction(() => document.querySelector("#viewer-image").naturalWidth);
  const transform = () => page.evaluate(() => document.querySelector("#viewer-image").style.transform);
  const scale = async () => Number((await transform()).match(/scale\(([\d.]+)\)/)?.[1] ?? 1);
  const stage = await page.locator("#viewer-stage").boundingBox();
  await page.mouse.move(stage.x + stage.width / 3, stage.y + stage.height / 3);
  await page.mouse.wheel(0, -400);
  assert.ok((await scale()) > 2);
  const before = await transform();
  await page.mouse.down();
  await page.mouse.move(stage.x + stage.width / 3 + 40, stage.y + stage.height / 3 + 30, { steps: 3 });
  await page.mouse.up();
  assert.notEqual(await transform(), before, "the image is dragged");
  const id = await page.locator("#viewer-facts").textContent();
  const panned = await transform();
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await transform(), panned, "arrow keys move a zoomed image");
  assert.equal(await page.locator("#viewer-facts").textContent(), id);
  await page.keyboard.press("0");
  assert.equal(await scale(), 1);
  await page.keyboard.press("+");
  assert.equal(await scale(), 1.5);
  await page.click("#zoom-out");
  assert.equal(await scale(), 1);
  await page.click("#zoom-level");
  assert.ok((await scale()) >= 2);
  await page.keyboard.press("Escape");
});

test("two images are compared side by side and with a slider", async (page) => {
  await page.locator("#grid input").nth(1).check();
  await page.waitForSelector("#compare:disabled");
  await page.locator("#grid input").nth(2).check();
  await page.click("#compare");
  await page.waitForSelector("#comparison[open]");
  await page.waitForFunction(() => [...document.querySelectorAll(".two img")].every((i) => i.complete && i.naturalWidth));
  await matches(page, "#right-facts", /a cat/);
  await shot(page, "comparison");
  await page.click("#swap");
  await matches(page, "#left-facts", /a cat/);
  await page.click("#compare-slider");
  await visible(page, "#over");
  await page.focus("#divider");
  await page.keyboard.press("Home");
  const clip = () => page.evaluate(() => getComputedStyle(document.querySelector("#left-over")).clipPath);
  const closed = await clip();
  for (let i = 0; i < 30; i++) await page.keyboard.press("ArrowRight");
  assert.notEqual(await clip(), closed);
  await shot(page, "slider");
  await page.click("#compare-side");
  await page.keyboard.press("Escape");
  await page.click("#selection-clear");
});

test("deleted images come back with undo, and from the trash", async (page, { server }) => {
  await prepare(page, server, 5);
  const before = await size(page);
  const id = await first(page).getAttribute("data-image");
  await page.locator("#grid .open").nth(0).click();
  await page.click("#viewer-actions .danger");
  await count(page, "#grid li", before - 1);
  // The note is inside the dialog: what is outside can't be used.
  await page.click(".toast-action");
  await count(page, "#grid li", before);
  assert.equal(await first(page).getAttribute("data-image"), id, "at its old place");
  await page.keyboard.press("Escape");

  await page.locator("#grid input").nth(0).check();
  await page.locator("#grid input").nth(3).click({ modifiers: ["Shift"] });
  await matches(page, "#selection-count", /^4 selected$/);
  await shot(page, "selection");
  await page.click("#selection-delete");
  await count(page, "#grid li", before - 4);
  await page.locator("h1").click();
  await page.keyboard.press("Control+z");
  await count(page, "#grid li", before);

  await page.locator("#grid input").nth(0).check();
  await page.click("#selection-delete");
  await page.selectOption("#gallery-filter", "trash");
  await count(page, "#grid li", 1);
  await page.locator("#grid input").nth(0).check();
  await page.click("#selection-restore");
  await matches(page, "#gallery-empty", /trash is empty/);
  await page.selectOption("#gallery-filter", "");
  await count(page, "#grid li", before);
  await page.locator("#grid input").nth(0).check();
  await page.click("#selection-delete");
  await page.selectOption("#gallery-filter", "trash");
  await count(page, "#grid li", 1);
  await page.locator("#grid input").nth(0).check();
  await matches(page, "#selection-delete", /for good/);
  await page.click("#selection-delete");
  await count(page, "#grid li", 0);
  await page.selectOption("#gallery-filter", "");
  await count(page, "#grid li", before - 1);
});

test("lists wait for changes that the server has not confirmed", async (page, { server }) => {
  await prepare(page, server, 4);
  const before = await size(page);
  const slow = async (route) => {
    if (route.request().method() === "PATCH") await new Promise((resolve) => setTimeout(resolve, 500));
    await route.continue();
  };
  await page.route("**/v1/images", slow);
  await page.locator("#grid input").nth(1).check();
  await page.click("#selection-delete");
  await page.selectOption("#gallery-filter", "trash");
  // What is shown is not the trash yet: no image of it is deleted for good.
  await matches(page, "#selection-delete", /^Delete$/);
  await matches(page, "#selection-delete", /for good/);
  await count(page, "#grid li", 1);
  await page.locator("#grid input").nth(0).check();
  await page.click("#selection-restore");
  await page.selectOption("#gallery-filter", "");
  await count(page, "#grid li", before);
  // Undo while another list is shown.
  await page.locator("#grid input").nth(0).check();
  await page.click("#selection-delete");
  await page.selectOption("#gallery-filter", "favourite");
  await matches(page, "#gallery-empty", /that you star/);
  await page.click(".toast-action");
  await matches(page, "#gallery-empty", /that you star/);
  await page.selectOption("#gallery-filter", "");
  await count(page, "#grid li", before);
  await page.unroute("**/v1/images", slow);
});

test("windows show each other's changes", async (page, { server, context }) => {
  await prepare(page, server, 3);
  const other = await openPage(context, server.address);
  await other.waitForSelector("[data-ready]");
  const before = await size(page);
  assert.equal(await size(other), before);
  await page.locator("#grid input").nth(2).check();
  const [gone, starred] = await Promise.all([0, 1].map((n) => other.locator("#grid li").nth(n).getAttribute("data-image")));
  await other.locator("#grid .star").nth(1).click();
  await matches(page, `[data-image="${starred}"] .star`, /true/, "aria-pressed");
  await other.locator("#grid input").nth(0).check();
  await other.click("#selection-delete");
  await page.waitForSelector(`[data-image="${gone}"]`, { state: "detached" });
  await matches(page, "#selection-count", /^1 selected$/);
  await other.click(".toast-action");
  await page.waitForSelector(`[data-image="${gone}"]`);
  await other.locator(`[data-image="${starred}"] .star`).click();
  await matches(page, `[data-image="${starred}"] .star`, /false/, "aria-pressed");
  await other.close();
  // An image that was deleted by somebody else disappears when it is used.
  await fetch(`${server.address}/v1/images/${gone}`, { method: "DELETE" });
  await page.click("#selection-clear");
  await page.locator(`[data-image="${gone}"] .star`).click();
  await page.waitForSelector(`[data-image="${gone}"]`, { state: "detached" });
  await page.click(".alert-close");
});

test("favourites are starred with the keyboard and survive a reload", async (page, { server }) => {
  await prepare(page, server, 3);
  await page.locator("#grid .star").nth(1).focus();
  await page.keyboard.press("Enter");
  await matches(page, "#grid li:nth-child(2) .star", /true/, "aria-pressed");
  await reload(page);
  await page.selectOption("#gallery-filter", "favourite");
  await count(page, "#grid li", 1);
  await page.locator("#grid .open").nth(0).click();
  await matches(page, "#viewer-star", /true/, "aria-pressed");
  await page.keyboard.press("f");
  await count(page, "#grid li", 0);
  await page.keyboard.press("Escape");
  await page.selectOption("#gallery-filter", "");
  await page.waitForFunction(() => document.querySelectorAll("#grid li").length > 2);
});

test("an image is upscaled", async (page) => {
  await generate(page, "a cat");
  await page.locator("#grid .open").nth(0).click();
  const buttons = page.locator("#viewer-actions button", { hasText: "Upscale" });
  assert.deepEqual(await buttons.allTextContents(), ["Upscale ×2", "Upscale ×4"]);
  const before = await size(page);
  await buttons.first().click();
  await count(page, "#grid li", before + 1);
  await page.waitForSelector("#working", { state: "hidden" });
  assert.equal(await page.evaluate(() => document.querySelector("#image").decode().then(() => document.querySelector("#image").naturalWidth)), 256);
});

test("more than a thousand images are starred at once", async (page, { server }) => {
  await prepare(page, server, 1);
  const [image] = (await (await fetch(`${server.address}/v1/images?limit=1`)).json()).data;
  const data = Array.from({ length: 1200 }, (_, i) => ({ ...image, id: `${image.id}-${i}`, favourite: false }));
  const sent = [];
  const list = /\/v1\/images(\?.*)?$/;
  await page.route(list, (route) => {
    if (route.request().method() === "GET") return route.fulfill({ json: { data, more: false } });
    const { ids, ...marks } = route.request().postDataJSON();
    sent.push({ ids, marks });
    return route.fulfill({ json: { data: ids.map((id) => ({ ...image, id, ...marks })) } });
  });
  await reload(page);
  await count(page, "#grid li", 1200);
  await page.locator("#grid li").first().locator("input").check({ force: true });
  await page.click("#selection-all");
  await matches(page, "#selection-count", /^1200 selected$/);
  await page.click("#selection-star");
  await count(page, "#grid .star[aria-pressed=true]", 1200);
  // The server takes a thousand at a time.
  assert.deepEqual(sent.map(({ ids }) => ids.length), [1000, 200]);
  assert.equal(new Set(sent.flatMap(({ ids }) => ids)).size, 1200);
  assert.ok(sent.every(({ marks }) => marks.favourite === true));
  await page.unroute(list);
  await reload(page);
});
