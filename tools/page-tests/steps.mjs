// Steps that the tests share.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

export const tests = [];
export const test = (name, run) => tests.push({ name, run });

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Accessibility violations of the page as it is. */
export async function violations(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  return violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`);
}

export const shot = (page, name, options) => page.screenshot({ path: join(process.env.SHOTS, `${name}.png`), ...options });
export const submitted = (page) => page.waitForRequest((r) => /\/v1\/jobs(\?|$)/.test(r.url()) && r.method() === "POST");
export const steps = (page, n) => page.fill("#steps-number", String(n)).then(() => page.dispatchEvent("#steps-number", "input"));
/** Back to small images, after a test of sizes. */
export const small = async (page) => {
  for (const side of ["width", "height"]) await page.fill(`#${side}-number`, "128");
};
export const images = (page, n) => page.fill("#count", String(n)).then(() => page.dispatchEvent("#count", "input"));
export const visible = (page, selector) => page.waitForSelector(selector, { state: "visible" });
export const hidden = (page, selector) => page.waitForSelector(selector, { state: "hidden" });
export const count = (page, selector, n) =>
  page.waitForFunction(([selector, n]) => document.querySelectorAll(selector).length === n, [selector, n]);

/** Waits until an element's value, text or attribute matches. */
export const matches = (page, selector, pattern, attribute) => page.waitForFunction(
  ([selector, source, attribute]) => {
    const element = document.querySelector(selector);
    const text = () => (element.matches("input, textarea, select") ? element.value : element.textContent);
    return element && new RegExp(source).test(attribute ? element.getAttribute(attribute) : text());
  },
  [selector, pattern.source, attribute],
);

/** Whether an element is within the window. */
export const isInView = (page, selector) => page.evaluate((selector) => {
  const box = document.querySelector(selector).getBoundingClientRect();
  return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth;
}, selector);

/** Submits a job with this prompt and number of steps. */
export async function submit(page, prompt, n) {
  await page.fill("#prompt", prompt);
  await steps(page, n);
  await page.click("#generate");
}

/** Submits a job that is long enough on a fast machine, too, and waits until it runs. */
export async function occupy(page, prompt) {
  await images(page, 8);
  for (const side of ["width", "height"]) await page.fill(`#${side}-number`, "256");
  await submit(page, prompt, 200);
  await images(page, 1);
  await small(page);
  await running(page);
}

/** Generates an image with few steps and waits for it. */
export async function generate(page, prompt, n = 2) {
  const before = await page.locator("#grid li").count();
  await submit(page, prompt, n);
  await page.waitForFunction((count) => document.querySelectorAll("#grid li").length > count, before, { timeout: 60_000 });
  await page.waitForSelector("#working", { state: "hidden", timeout: 60_000 });
}

/** Waits until a step of a job is shown. */
export const running = async (page) => {
  // The hidden text still shows the previous job.
  await visible(page, "#working");
  await page.waitForFunction(() => /Step \d+/.test(document.querySelector("#working-text").textContent), null, { timeout: 60_000 });
};

export async function reload(page) {
  await page.reload();
  await page.waitForSelector("[data-ready]");
}
