// Starts a server and a browser; helpers.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { deflateSync } from "node:zlib";
import { chromium } from "playwright-core";

/** Starts `kiln serve` with an empty data folder on a free port. */
export async function startServer(...options) {
  const folder = mkdtempSync(join(tmpdir(), "kiln-page-"));
  const server = spawn(process.env.KILN, ["serve", "--port", "0", "--data", folder, "--loras", join(folder, "loras"), ...options]);
  let log = "";
  const address = await new Promise((resolve, reject) => {
    server.stderr.on("data", (text) => {
      log += text;
      const match = log.match(/at (http:\/\/\S+)\s/);
      if (match) resolve(match[1]);
    });
    server.on("exit", () => reject(new Error(`the server ended:\n${log}`)));
    setTimeout(() => reject(new Error(`the server does not start:\n${log}`)), 30_000);
  });
  for (let i = 0; i < 300 && !(await fetch(`${address}/readyz`)).ok; i++) await new Promise((r) => setTimeout(r, 100));
  const stop = () => {
    server.kill("SIGKILL");
    rmSync(folder, { recursive: true, force: true });
  };
  return { address, stop, log: () => log };
}

export const startBrowser = () =>
  chromium.launch({ executablePath: process.env.BROWSER, args: ["--no-sandbox", "--disable-gpu"] });

/** A PNG file of one colour. */
export function png(width, height, [r, g, b]) {
  const chunk = (type, data) => {
    const body = Buffer.concat([Buffer.from(type), data]);
    const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
    length.writeUInt32BE(data.length);
    sum.writeUInt32BE(crc(body));
    return Buffer.concat([length, body, sum]);
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 2, 0, 0, 0], 8);
  const row = Buffer.concat([Buffer.from([0]), Buffer.from(Array(width).fill([r, g, b]).flat())]);
  const rows = deflateSync(Buffer.concat(Array(height).fill(row)));
  const magic = Buffer.from([0x89, 0x50, 0x4e, 0x47, 13, 10, 26, 10]);
  return Buffer.concat([magic, chunk("IHDR", head), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}

function crc(bytes) {
  let sum = ~0;
  for (const byte of bytes) {
    sum ^= byte;
    for (let k = 0; k < 8; k++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}
