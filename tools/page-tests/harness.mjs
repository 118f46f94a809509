// Starts a server and a browser; helpers.

import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { connect, createServer as createTcpServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { deflateSync } from "node:zlib";
import { chromium } from "playwright-core";

/**
 * Starts `kiln serve` with an empty data folder on a free port. If the variable NATS names a nats-server, it is a gateway with
 * a worker.
 */
export async function startServer(...options) {
  if (!process.env.NATS) return startAlone(...options);
  const folder = mkdtempSync(join(tmpdir(), "kiln-page-"));
  const port = await freePort();
  const queue = `nats://127.0.0.1:${port}`;
  const nats = spawn(process.env.NATS, ["-js", "-a", "127.0.0.1", "-p", port, "-sd", join(folder, "nats")], { stdio: "ignore" });
  for (let i = 0; i < 100 && !(await answers(port)); i++) await new Promise((r) => setTimeout(r, 100));
  const worker = spawn(process.env.KILN, ["worker", "--queue", queue, "--loras", join(folder, "loras")], { stdio: "ignore" });
  const end = () => [worker, nats].forEach((process) => process.kill("SIGKILL"));
  process.on("exit", end);
  const server = await start(folder, 0, ["--queue", queue, ...options]);
  for (let i = 0; i < 300; i++) {
    const models = await (await fetch(`${server.address}/v1/models`)).json().catch(() => ({}));
    if (models.data?.length) break;
    await new Promise((r) => setTimeout(r, 100));
  }
  const stop = async () => {
    await server.kill();
    end();
    rmSync(folder, { recursive: true, force: true, maxRetries: 5 });
  };
  return { ...server, stop };
}

/** Starts `kiln serve` without a queue elsewhere. */
export const startAlone = (...options) => start(mkdtempSync(join(tmpdir(), "kiln-page-")), 0, options);

const freePort = () =>
  new Promise((resolve) => {
    const server = createTcpServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(String(port)));
    });
  });

const answers = (port) =>
  new Promise((resolve) => {
    const socket = connect(Number(port), "127.0.0.1", () => resolve(true) ?? socket.destroy());
    socket.on("error", () => resolve(false));
  });

async function start(folder, port, options) {
  const args = ["serve", "--port", String(port), "--data", folder, "--loras", join(folder, "loras"), ...options];
  const server = spawn(process.env.KILN, args, { env: { ...process.env, HF_HOME: join(folder, "hf") } });
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
  const ended = new Promise((resolve) => server.on("exit", resolve));
  /** Kills the server and keeps its data. */
  const kill = async () => {
    server.kill("SIGKILL");
    await ended;
  };
  const stop = async () => {
    await kill();
    rmSync(folder, { recursive: true, force: true });
  };
  /** Stops it from answering, with its connections open; and lets it go on. */
  const freeze = () => server.kill("SIGSTOP");
  const thaw = () => server.kill("SIGCONT");
  /** Starts it again at the same address with the same data. */
  const restart = () => start(folder, Number(new URL(address).port), options);
  return { address, folder, kill, stop, restart, freeze, thaw, log: () => log };
}

/** Opens the page of a server in a new window. Its images are small: they take a quarter of the time. */
export async function openPage(context, address, prepare = () => {}) {
  await servePage(context, address);
  await context.addInitScript(() => localStorage.getItem("kiln.form") ?? localStorage.setItem("kiln.form", '{"width":128,"height":128}'));
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  await prepare(page);
  await page.goto(address);
  return page;
}

/** Serves the files of the folder PAGE instead of the built-in ones, to work on the page. */
async function servePage(context, address) {
  if (!process.env.PAGE) return;
  const policy = (await fetch(address)).headers.get("content-security-policy");
  const send = (name) => (route) => route.fulfill({
    path: join(process.env.PAGE, name ?? new URL(route.request().url()).pathname.slice(6)),
    headers: { "content-security-policy": policy, "content-type": TYPES[(name ?? new URL(route.request().url()).pathname).split(".").pop()] },
  });
  await context.route(/\/page\/[^/]+$/, send());
  await context.route(`${address}/`, send("index.html"));
}

const TYPES = {
  html: "text/html; charset=utf-8", js: "text/javascript; charset=utf-8", css: "text/css; charset=utf-8", svg: "image/svg+xml",
  png: "image/png", webmanifest: "application/manifest+json",
};

export const startBrowser = () =>
  chromium.launch({ executablePath: process.env.BROWSER, args: ["--no-sandbox", "--disable-gpu"] });

/** A PNG file of one colour, optionally with a recipe. */
export function png(width, height, [r, g, b], recipe) {
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
  const text = recipe === undefined ? [] : [chunk("iTXt", Buffer.concat([Buffer.from("kiln\0\0\0\0\0"), Buffer.from(recipe)]))];
  return Buffer.concat([magic, chunk("IHDR", head), ...text, chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}

function crc(bytes) {
  let sum = ~0;
  for (const byte of bytes) {
    sum ^= byte;
    for (let k = 0; k < 8; k++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

/** A hub with a model of these folders, as Hugging Face's; weight files stop after some bytes until `release` is called. */
export async function startHub(repo, folders) {
  const commit = "0123456789abcdef0123456789abcdef01234567";
  const files = new Map();
  for (const [prefix, folder] of folders) {
    const paths = readdirSync(folder, { recursive: true }).map(String);
    for (const path of paths.filter((path) => /\.(json|safetensors)$/.test(path))) files.set(prefix + path, readFileSync(join(folder, path)));
  }
  const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");
  let release;
  const released = new Promise((resolve) => (release = resolve));
  const hub = createServer(async (request, response) => {
    const url = new URL(request.url, "http://hub");
    if (url.pathname.startsWith(`/api/models/${repo}/revision/`)) {
      const siblings = [...files].map(([rfilename, bytes]) => ({ rfilename, lfs: { size: bytes.length, sha256: sha256(bytes) } }));
      return response.end(JSON.stringify({ sha: commit, siblings }));
    }
    const path = decodeURIComponent(url.pathname).split(`/${repo}/resolve/${commit}/`)[1];
    const bytes = files.get(path);
    if (!bytes) return response.writeHead(404).end();
    const from = Number(request.headers.range?.match(/bytes=(\d+)-/)?.[1] ?? 0);
    response.writeHead(from ? 206 : 200, { "content-length": bytes.length - from, ...(from && { "content-range": `bytes ${from}-${bytes.length - 1}/${bytes.length}` }) });
    if (!path.endsWith(".safetensors")) return response.end(bytes.subarray(from));
    response.write(bytes.subarray(from, from + 1000));
    await released;
    return response.end(bytes.subarray(from + 1000));
  });
  await new Promise((resolve) => hub.listen(0, "127.0.0.1", resolve));
  return { endpoint: `http://127.0.0.1:${hub.address().port}`, release, stop: () => hub.close() };
}
