// Tests of the page of `kiln serve` in a real browser. `page.mjs PATTERN` runs the tests whose names match it.

import assert from "node:assert/strict";

import { openPage, startBrowser, startServer } from "./harness.mjs";
import { shot, tests } from "./steps.mjs";
import "./generating.mjs";
import "./queue.mjs";
import "./inputs.mjs";
import "./gallery.mjs";
import "./settings.mjs";
import "./trainings.mjs";
import "./faults.mjs";
import "./stalls.mjs";
import "./keeping.mjs";
import "./pressing.mjs";
import "./devices.mjs";

const chosen = tests.filter(({ name }) => new RegExp(process.argv[2] ?? "").test(name));
const started = Date.now();
const server = await startServer();
const browser = await startBrowser();
let failed = 0;
try {
  const context = await browser.newContext({ viewport: { width: 1360, height: 900 }, colorScheme: "dark" });
  const page = await openPage(context, server.address);
  // SLOW=10 simulates a processor ten times slower, to find missing waits.
  if (process.env.SLOW) {
    const session = await context.newCDPSession(page);
    await session.send("Emulation.setCPUThrottlingRate", { rate: Number(process.env.SLOW) });
  }
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.stack ?? error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.waitForSelector("[data-ready]");
  await shot(page, "empty");
  /** A fresh page without jobs and with a fresh form, after a failure. */
  const cleanUp = async () => {
    for (const id of await page.evaluate(() => JSON.parse(localStorage.getItem("kiln.jobs")) ?? [])) {
      await fetch(`${server.address}/v1/jobs/${id}`, { method: "DELETE" });
    }
    await page.evaluate(() => localStorage.clear());
    await page.reload();
    await page.waitForSelector("[data-ready]");
    errors.length = 0;
  };
  const once = async (run) => {
    // Close dialogs that a failed test left open.
    await page.evaluate(() => document.querySelectorAll("dialog[open]").forEach((d) => d.close()));
    await run(page, { browser, server, context });
    // The console also lists requests that fail on purpose.
    const unexpected = errors.splice(0).filter((text) => !/status of (4|503)/.test(text));
    assert.deepEqual(unexpected, []);
  };
  for (const { name, run } of chosen) {
    const before = Date.now();
    try {
      try {
        await once(run);
      } catch (error) {
        // A busy machine may be too slow for a wait: retry once from a fresh page.
        console.log(`retry ${name}\n${error.stack}`);
        await shot(page, `slow-${name.replaceAll(/[^a-z]+/g, "-").slice(0, 80)}`);
        await cleanUp();
        await once(run);
      }
      console.log(`ok    ${name} (${((Date.now() - before) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${name}\n${error.stack}`);
      await shot(page, `failed-${failed}`);
      await cleanUp();
    }
  }
} finally {
  await browser.close();
  server.stop();
}
console.log(`\n${chosen.length - failed} passed, ${failed} failed in ${Math.round((Date.now() - started) / 1000)} s`);
process.exit(failed ? 1 : 0);
