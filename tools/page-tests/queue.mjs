// The queue: this client's jobs, in an order of its own; plots.

import assert from "node:assert/strict";

import { openPage } from "./harness.mjs";
import { count, generate, hidden, matches, occupy, shot, steps, submit, test, visible, violations } from "./steps.mjs";

const prompts = (page) => page.locator("#queue .prompt").allTextContents();
/** Waits until a window shows the queued jobs in this order. */
const shows = (page, order) => page.waitForFunction(
  (order) => [...document.querySelectorAll("#queue .prompt")].map((prompt) => prompt.textContent).join() === order,
  order.join(),
);
/** The prompts of the page's jobs behind the running one, as the server orders them. */
const serverOrder = (page) => page.evaluate(async () => {
  const answer = await fetch("/v1/queue", { headers: { "x-client-id": JSON.parse(localStorage.getItem("kiln.client")) } });
  return (await answer.json()).data.slice(1).map(({ request }) => request.prompt);
});

test("queued jobs are reordered with the keyboard and cancelled", async (page) => {
  await occupy(page, "a house");
  // Jobs with other steps don't join a batch that is planned already.
  for (const [i, prompt] of ["a crown", "a boat", "a bell"].entries()) await submit(page, prompt, 3 + i);
  await count(page, "#queue li", 3);
  // The next job may be planned already; the others wait.
  await page.focus("#queue li:nth-child(3) .up");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll("#queue .prompt")[1]?.textContent === "a bell");
  assert.deepEqual(await prompts(page), ["a crown", "a bell", "a boat"]);
  await shot(page, "queue");
  await page.locator("#queue li", { hasText: "a boat" }).locator(".remove").click();
  await count(page, "#queue li", 2);
  await page.click("#cancel-all");
  await hidden(page, "#working");
  await count(page, "#queue li", 0);
});

test("two windows reorder the queue at the same time", async (page, { context, server }) => {
  await occupy(page, "a tower");
  for (const [i, prompt] of ["a crown", "a boat", "a bell", "a lamp"].entries()) await submit(page, prompt, 3 + i);
  await count(page, "#queue li", 4);
  const other = await openPage(context, server.address);
  try {
    await other.waitForSelector("[data-ready]");
    await count(other, "#queue li", 4);
    // The other window hears nothing of the new order until it has moved a job itself.
    let release;
    const held = new Promise((resolve) => (release = resolve));
    await other.route("**/v1/queue", async (route) => {
      if (route.request().method() === "GET") await held;
      await route.continue();
    });
    const job = (window, prompt) => window.locator("#queue li", { hasText: prompt });
    await job(page, "a bell").locator(".up").click();
    await page.waitForFunction(() => document.querySelectorAll("#queue .prompt")[1]?.textContent === "a bell");
    assert.deepEqual(await prompts(other), ["a crown", "a boat", "a bell", "a lamp"]);
    await job(other, "a lamp").locator(".up").click();
    release();
    const merged = ["a crown", "a lamp", "a bell", "a boat"];
    for (const window of [page, other]) await shows(window, merged);
    // Both at once: no job is lost, and both windows show the server's order.
    const moved = [page, other].map((window) => window.waitForResponse((response) => response.request().method() === "PUT"));
    await Promise.all([job(page, "a boat").locator(".up").click(), job(other, "a lamp").locator(".down").click(), ...moved]);
    const order = await serverOrder(page);
    assert.deepEqual([...order].sort(), [...merged].sort());
    for (const window of [page, other]) await shows(window, order);
  } finally {
    await other.close();
  }
  await page.click("#cancel-all");
  await hidden(page, "#working");
  await count(page, "#queue li", 0);
});

test("an answer that was on its way does not bring back a cancelled job", async (page) => {
  await occupy(page, "a fence");
  for (const [i, prompt] of ["a crown", "a boat"].entries()) await submit(page, prompt, 3 + i);
  await count(page, "#queue li", 2);
  let release;
  const held = new Promise((resolve) => (release = resolve));
  await new Promise((resolve) => page.route("**/v1/queue", async (route) => {
    const response = await route.fetch();
    resolve();
    await held;
    await route.fulfill({ response });
  }, { times: 1 }));
  await page.locator("#queue li", { hasText: "a boat" }).locator(".remove").click();
  await count(page, "#queue li", 1);
  await page.evaluate(() => {
    const queue = document.querySelector("#queue");
    new MutationObserver(() => (queue.dataset.most = Math.max(queue.dataset.most ?? 0, queue.children.length))).observe(queue, { childList: true });
  });
  release();
  // The late answer, and the next.
  for (let i = 0; i < 2; i++) await page.waitForResponse("**/v1/queue");
  assert.notEqual(await page.getAttribute("#queue", "data-most"), "2");
  await page.click("#cancel-all");
  await hidden(page, "#working");
});

test("a job of another client is neither shown nor cancelled", async (page, { server }) => {
  const post = (body) => fetch(`${server.address}/v1/jobs`, { method: "POST", headers: { "content-type": "application/json", "x-client-id": "other" }, body: JSON.stringify(body) });
  const { id } = await (await post({ prompt: "a train", steps: 200, width: 256, height: 256 })).json();
  await page.reload();
  await page.waitForSelector("[data-ready]");
  await hidden(page, "#working");
  await submit(page, "a sheep", 3);
  await matches(page, "#working-text", /Queued/);
  await page.focus("#generate");
  await page.keyboard.press("Escape");
  await hidden(page, "#working");
  const other = await (await fetch(`${server.address}/v1/jobs/${id}`)).json();
  assert.ok(["queued", "running"].includes(other.status), other.status);
  await fetch(`${server.address}/v1/jobs/${id}`, { method: "DELETE" });
});

test("many queued jobs do not use up the browser's connections", async (page) => {
  await occupy(page, "a wall");
  for (let i = 0; i < 8; i++) await page.evaluate(() => document.querySelector("#form").requestSubmit());
  await page.waitForFunction(() => document.querySelectorAll("#queue li").length >= 1);
  for (let i = 0; i < 7; i++) {
    await page.click("#generate");
    await page.waitForTimeout(30);
  }
  await page.waitForFunction(() => document.querySelectorAll("#queue li").length >= 7);
  await page.fill("#search", "balloon");
  await page.waitForFunction(() => [...document.querySelectorAll("#grid img")].every((i) => i.alt.includes("balloon")));
  await page.fill("#search", "");
  await page.click("#cancel-all");
  await hidden(page, "#working");
});

test("a plot is one order for all combinations of two settings", async (page) => {
  await page.fill("#prompt", "a lamp");
  await steps(page, 2);
  await page.click("#plot-open");
  await visible(page, "#plot-dialog");
  await page.fill("#x-values", "5-6");
  await page.selectOption("#y-field", "steps");
  await page.fill("#y-values", "two");
  await matches(page, "#plot-note", /“two” is not a number/);
  await page.waitForSelector("#plot-submit:disabled");
  await page.fill("#y-values", "1, 2");
  await matches(page, "#plot-note", /^4 images$/);
  assert.deepEqual(await violations(page), []);
  await page.click("#plot-submit");
  await visible(page, "#plot-view");
  await matches(page, "#plot-status", /^4 images$/);
  await count(page, "#plot-table img", 4);
  assert.deepEqual(await page.locator("#plot-table th").allTextContents(), ["Seed 5", "Seed 6", "Steps 1", "Steps 2"]);
  await page.waitForFunction(() => [...document.querySelectorAll("#plot-table img")].every((i) => i.complete && i.naturalWidth));
  await shot(page, "plot");
  assert.deepEqual(await violations(page), []);
  const download = page.waitForEvent("download");
  await page.click("#plot-save");
  assert.match((await download).suggestedFilename(), /^plot-.*\.png$/);
  await page.keyboard.press("Escape");
  await hidden(page, "#working");
  // It is still there after a reload.
  await page.reload();
  await page.waitForSelector("[data-ready]");
  await page.click("#plot-open");
  await page.click("#plot-latest .entry");
  await count(page, "#plot-table img", 4);
  await page.keyboard.press("Escape");
  await generate(page, "a cat");
});
