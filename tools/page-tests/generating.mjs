// Generating images: preview, progress, several images, seeds, wildcards.

import assert from "node:assert/strict";

import { count, generate, hidden, images, matches, occupy, running, shot, steps, submit, submitted, test, visible } from "./steps.mjs";

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
  assert.equal(await page.evaluate(() => document.querySelector("#image").decode().then(() => document.querySelector("#image").naturalWidth)), 128);
  await count(page, "#grid li", before + 1);
  await hidden(page, "#alerts .alert");
  await page.waitForFunction(() => [...document.querySelectorAll("#grid img")].every((i) => i.complete));
  await shot(page, "generated");
});

test("a job is cancelled with a key, but not from a field", async (page) => {
  await submit(page, "a robot", 200);
  await running(page);
  for (const field of ["#prompt", "#search", "#seed", "#model"]) {
    await page.focus(field);
    await page.keyboard.press("Escape");
  }
  await page.waitForTimeout(300);
  const status = () => page.evaluate(() => fetch("/v1/jobs?limit=1").then((r) => r.json()).then((list) => list.data[0].status));
  assert.equal(await status(), "running", "Escape in a field cancels nothing");
  await page.focus("#generate");
  await page.keyboard.press("Escape");
  await hidden(page, "#working");
  assert.equal(await status(), "cancelled");
});

test("all images of a job are on the stage, each with its seed", async (page) => {
  await images(page, 3);
  await page.fill("#seed", "100");
  await submit(page, "a {red|green|blue|yellow} balloon", 4);
  await page.waitForSelector("#results li:nth-child(3)");
  await page.waitForSelector("#results .open", { timeout: 60_000 });
  await shot(page, "grid");
  await page.waitForSelector("#working", { state: "hidden", timeout: 60_000 });
  await count(page, "#results .open", 3);
  await count(page, "#grid li:nth-child(-n+3) img", 3);
  const labels = await page.locator("#results .seed-label").allTextContents();
  assert.deepEqual(labels, ["seed 100", "seed 101", "seed 102"]);
  // The seed chooses a colour for each image.
  const alts = await page.locator("#results img").evaluateAll((list) => list.map((i) => i.alt));
  assert.ok(alts.every((alt) => /^a (red|green|blue|yellow) balloon$/.test(alt)), alts.join());
  await page.waitForFunction(() => [...document.querySelectorAll("#results img, #grid li:nth-child(-n+3) img")].every((i) => i.complete && i.naturalWidth));
  await page.locator("#results .open").nth(1).click();
  await matches(page, "#viewer-facts", /101/);
  await page.click("#viewer-actions button:text('Reuse settings')");
  assert.deepEqual([await page.inputValue("#seed"), await page.inputValue("#count")], ["101", "1"]);
  await images(page, 1);
  await page.click("#lock");
});

test("what the server has to say about a prompt is below it, while the job runs and after", async (page) => {
  await page.click("#advanced summary");
  await page.fill("#max-tokens", "2");
  await occupy(page, "a cat on a red chair in the garden");
  await matches(page, "#prompt-notes", /prompt/i);
  await visible(page, "#working");
  await visible(page, "#prompt-notes");
  await hidden(page, "#notes");
  await shot(page, "prompt-notes");
  // On a phone the prompt is out of sight.
  await page.setViewportSize({ width: 390, height: 844 });
  await visible(page, "#notes");
  await hidden(page, "#prompt-notes");
  await shot(page, "prompt-notes-phone");
  await page.setViewportSize({ width: 1360, height: 900 });
  await page.click("#cancel");
  await hidden(page, "#working");
  await visible(page, "#prompt-notes");
  await page.fill("#max-tokens", "");
  await generate(page, "a cat");
  await page.waitForFunction(() => !/garden|token/.test(document.querySelector("#prompt-notes").textContent));
  await page.click("#advanced summary");
});

test("words that the model has not learned are named below the prompt, with what it draws", async (page) => {
  await page.fill("#prompt", "an astronaut riding a horse");
  await steps(page, 2);
  await page.click("#generate");
  await matches(page, "#prompt-notes", /Ember has not learned "riding".*it draws/);
  await page.locator("#prompt").scrollIntoViewIfNeeded();
  await shot(page, "unknown-words");
  await hidden(page, "#working");
  await generate(page, "a red apple on a blue background");
  await page.waitForFunction(() => !document.querySelector("#prompt-notes").textContent.includes("not learned"));
});

test("seeds are rolled, locked and checked", async (page) => {
  await page.fill("#prompt", "a cat");
  await page.locator("#dice").click();
  const rolled = await page.inputValue("#seed");
  await matches(page, "#lock", /false/, "aria-pressed");
  let sent = submitted(page);
  await generate(page, "a cat");
  assert.equal(String((await sent).postDataJSON().seed), rolled, "the next job has the rolled seed");
  sent = submitted(page);
  await generate(page, "a cat");
  assert.notEqual(String((await sent).postDataJSON().seed), rolled, "the one after it a new one");

  await page.locator("h1").click();
  await page.keyboard.press("d");
  await page.keyboard.press("l");
  await matches(page, "#lock", /true/, "aria-pressed");
  await page.fill("#seed", "18446744073709551616");
  const message = await page.evaluate(() => document.querySelector("#seed").validationMessage);
  assert.match(message, /too large: the largest one is 18446744073709551615/);
  await page.click("#generate");
  assert.ok(await page.evaluate(() => document.activeElement.id === "seed"), "the field with the mistake has the focus");
  await page.fill("#seed", "-1");
  assert.match(await page.evaluate(() => document.querySelector("#seed").validationMessage), /whole number/);
  await page.fill("#seed", "18446744073709551615");
  sent = submitted(page);
  await generate(page, "a cat");
  assert.match((await sent).postData(), /"seed":18446744073709551615\}/, "no digit is lost");
  await page.click("#lock");
  await visible(page, "#stage-actions");
});
