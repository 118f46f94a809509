// Takes the screenshots of docs/page.md: KILN=… BROWSER=… node screenshots.mjs FOLDER

import { writeFileSync } from "node:fs";
import { join } from "node:path";

import { openPage, startBrowser, startServer } from "./harness.mjs";
import { generate, images } from "./steps.mjs";

const QUALITY = 0.82;
const server = await startServer();
const browser = await startBrowser();

/** Saves a screenshot as WebP, which the browser encodes. */
async function save(page, name) {
  const png = (await page.screenshot()).toString("base64");
  const url = await page.evaluate(async ([png, quality]) => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: image.naturalWidth, height: image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/webp", quality);
  }, [png, QUALITY]);
  writeFileSync(join(process.argv[2], `${name}.webp`), Buffer.from(url.split(",")[1], "base64"));
}

async function open(options) {
  const page = await openPage(await browser.newContext(options), server.address);
  await page.waitForSelector("[data-ready]");
  await page.click("#presets button:text('Square')");
  return page;
}

const loaded = (page) => page.waitForFunction(() => [...document.images].every((image) => !image.getAttribute("src") || !image.checkVisibility() || image.naturalWidth));

const page = await open({ viewport: { width: 1280, height: 860 }, colorScheme: "dark" });
for (const prompt of ["a red apple on a blue background", "a green tree on a hill", "a yellow star at night", "a rocket", "a purple mushroom", "an orange cat"]) {
  await generate(page, prompt, 4);
}
await images(page, 4);
await generate(page, "a {red|blue|yellow|green} balloon over the sea", 4);
await page.evaluate(() => {
  document.activeElement.blur();
  document.querySelector(".scroll").scrollTo(0, 0);
});
await loaded(page);
await page.mouse.move(0, 0);
await save(page, "desktop");
// Two images of one seed.
await images(page, 1);
await page.fill("#seed", "7");
for (const colour of ["red", "blue"]) await generate(page, `a ${colour} sports car`, 4);
for (const i of [0, 1]) await page.locator("#grid input").nth(i).check();
await page.click("#compare");
await page.click("#compare-slider");
await loaded(page);
await save(page, "slider");
const phone = await open({ viewport: { width: 390, height: 780 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true, colorScheme: "light" });
await generate(phone, "a lighthouse at sunset", 4);
await phone.evaluate(() => scrollTo(0, 0));
await loaded(phone);
await save(phone, "phone");
await browser.close();
await server.stop();
process.exit(0);
