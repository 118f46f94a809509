#!/usr/bin/env python3
"""Compares the latency and throughput of `kiln serve` with the sum of its phases.

    bench/serve_speed.py --kiln target/release/kiln --model models/klein-4b --device cuda --dtype bf16 --check

1. `kiln bench` measures text, one step, decode and a whole image.
2. A server is started on a free port of 127.0.0.1, with an empty data folder and without the text cache, and warmed up.
3. Sequential requests on a keep-alive connection: to `/v1/images/generations`, until the response with the image is
   read, and as jobs, until the image's file is read. Their median is compared with the bench's image.
4. Many concurrent jobs, each with its own prompt and seed: images per second from the first submit to the last
   finish, and between the first and the last finish, compared with `1 / (steps * step + decode + text)`.
5. With `--check`, `kiln generate` generates two of the images again, which must have the same pixels.

Prints the report at the end, with `--json` as JSON. Needs only Python. Exit status 1 if a request fails or a
pixel differs.
"""

import argparse
import base64
import http.client
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

PHASES = {"text": "text encode", "step": "step", "decode": "vae decode", "image": "text to image, 4 steps"}
BENCH_STEPS = 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="target/release/kiln", help="the program")
    parser.add_argument("--model", default="ember", help="path or name, as for `-m`")
    parser.add_argument("--size", default="1024x1024", type=size, metavar="WxH")
    parser.add_argument("--steps", default=4, type=int)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, help="text tokens for the bench, if not 512")
    parser.add_argument("--requests", default=8, type=int, help="sequential requests per API")
    parser.add_argument("--jobs", default=32, type=int, help="concurrent jobs")
    parser.add_argument("--warmup", default=4, type=int, help="unmeasured requests")
    parser.add_argument("--repeat", type=int, help="runs of each phase in the bench")
    parser.add_argument("--limit", default=900, type=float, help="timeout in seconds")
    parser.add_argument("--check", action="store_true", help="compare two images with `kiln generate`")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    if min(args.steps, args.requests) < 1 or args.jobs < 2 or args.warmup < 0:
        parser.error("requires at least 1 step, 1 request and 2 jobs")
    return args


def size(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError("expected WxH, such as 1024x1024")
    return int(match[1]), int(match[2])


def note(text):
    print(text, file=sys.stderr, flush=True)


def machine(args):
    options = ["--device", args.device, "--dtype", args.dtype]
    return options + (["--threads", str(args.threads)] if args.threads else [])


def environment():
    """Returns the environment without the variables that set a model or an API key."""
    return {name: value for name, value in os.environ.items() if name not in ("KILN_MODEL", "KILN_API_KEY", "KILN_DATA")}


def run(args, command):
    """Runs a command and returns its standard output."""
    try:
        ran = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=args.limit
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"error: `{' '.join(command)}` took longer than {args.limit:.0f} s")
    except OSError as error:
        sys.exit(f"error: {command[0]}: {error.strerror}")
    if ran.returncode != 0:
        sys.exit(f"error: `{' '.join(command)}` failed\n{ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout


def bench(args):
    """Returns the seconds of each phase."""
    note("bench: text, step, decode, image …")
    width, height = args.size
    command = [args.kiln, "bench", "-m", args.model, *machine(args), "--size", f"{width}x{height}", "--json"]
    for phase in PHASES:
        command += ["--phase", phase]
    if args.max_tokens:
        command += ["--max-tokens", str(args.max_tokens)]
    if args.repeat:
        command += ["--repeat", str(args.repeat)]
    report = json.loads(run(args, command))
    medians = {phase["phase"]: phase["median"] for phase in report["phases"]}
    missing = [name for name in PHASES.values() if name not in medians]
    if missing:
        sys.exit(f"error: the bench did not measure {', '.join(missing)}: {'; '.join(report['notes'])}")
    times = {short: medians[name] for short, name in PHASES.items()}
    # The bench's image always has four steps.
    times["image"] += (args.steps - BENCH_STEPS) * times["step"]
    return report, times


class Server:
    """Runs `kiln serve` for the duration of the `with` block."""

    def __init__(self, args):
        self.args = args

    def __enter__(self):
        args = self.args
        note(f"starting the server with {args.model} …")
        self.folder = tempfile.TemporaryDirectory(prefix="kiln-serve-speed-")
        self.log = os.path.join(self.folder.name, "log")
        command = [args.kiln, "serve", "-m", args.model, "--host", "127.0.0.1", "--port", "0", *machine(args)]
        # A single client may use half of the queue.
        command += ["--data", os.path.join(self.folder.name, "data"), "--queue", str(2 * args.jobs + 2), "--no-cache"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def said(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def wait_until_ready(self):
        end = time.monotonic() + self.args.limit
        while time.monotonic() < end:
            if self.process.poll() is not None:
                sys.exit(f"error: the server ended\n{self.said()[-2000:]}")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", self.said())
            if found:
                self.port = int(found[1])
                client = Client(self)
                if client.ask("GET", "/readyz", expect=(200, 503))[0] == 200:
                    return
                client.close()
            time.sleep(0.1)
        sys.exit(f"error: the server was not ready within {self.args.limit:.0f} s\n{self.said()[-2000:]}")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self.folder.cleanup()


class Client:
    """A keep-alive connection."""

    def __init__(self, server):
        self.server = server
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=server.args.limit)

    def ask(self, method, path, body=None, expect=(200, 202)):
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            self.connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = self.connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            sys.exit(f"error: {method} {path}: {error!r}\n{self.server.said()[-2000:]}")
        if response.status not in expect:
            sys.exit(f"error: {method} {path}: {response.status} {data[:500].decode(errors='replace')}")
        return response.status, data

    def close(self):
        self.connection.close()

    def generation(self, request):
        """Returns the seconds until the image is received, and its file."""
        width, height = request["size"]
        body = {"prompt": request["prompt"], "seed": request["seed"], "steps": request["steps"], "size": f"{width}x{height}"}
        began = time.perf_counter()
        data = self.ask("POST", "/v1/images/generations", body)[1]
        took = time.perf_counter() - began
        return took, base64.b64decode(json.loads(data)["data"][0]["b64_json"])

    def submit(self, request):
        width, height = request["size"]
        body = {"prompt": request["prompt"], "seed": request["seed"], "steps": request["steps"]}
        return json.loads(self.ask("POST", "/v1/jobs", {**body, "width": width, "height": height})[1])["id"]

    def file(self, job):
        """Returns the file of a job's image."""
        if job["status"] != "done":
            sys.exit(f"error: job {job['id']} is {job['status']}: {job.get('error')}")
        return self.ask("GET", f"/v1/images/{job['images'][0]['id']}/file")[1]

    def job(self, request):
        """Does the same as `generation` with a job, following its events to the end."""
        began = time.perf_counter()
        events = self.ask("GET", f"/v1/jobs/{self.submit(request)}/events")[1].decode()
        end = re.search(r"^event: ?end\n(?:id:.*\n)?data: ?(.*)$", events.replace("\r\n", "\n"), re.MULTILINE)
        if not end:
            sys.exit(f"error: the events of a job have no end: {events[-500:]}")
        data = self.file(json.loads(end[1]))
        return time.perf_counter() - began, data


class RequestSeries:
    """Requests that differ in prompt and seed only."""

    def __init__(self, args):
        self.args, self.count = args, 0

    def next(self):
        self.count += 1
        prompt = f"a red apple beside cup number {self.count} on a wooden table"
        return dict(prompt=prompt, seed=self.count, steps=self.args.steps, size=self.args.size)


def burst(server, requests, count):
    """Submits concurrent jobs; returns their requests, ids, finish times and the first submit time, in wall-clock seconds."""
    client, all_requests = Client(server), [requests.next() for _ in range(count)]
    began = time.time()
    ids = [client.submit(request) for request in all_requests]
    submitted = time.time()
    end, finished = time.monotonic() + server.args.limit, []
    for job_id in ids:
        # Finish times are the server's, so infrequent polling does not affect them.
        while True:
            job = json.loads(client.ask("GET", f"/v1/jobs/{job_id}")[1])
            if job["status"] in ("failed", "cancelled"):
                sys.exit(f"error: job {job_id} is {job['status']}: {job.get('error')}")
            if job["status"] == "done" and job["finished"] is not None:
                break
            if time.monotonic() > end:
                sys.exit(f"error: {count - len(finished)} of {count} jobs not done in {server.args.limit:.0f} s")
            time.sleep(0.05)
        finished.append(job["finished"] / 1000)
    return client, all_requests, ids, dict(began=began, submitted=submitted, finished=sorted(finished))


def measure(args, server):
    """Returns latencies, the burst's times, and two images with their requests."""
    requests, client = RequestSeries(args), Client(server)
    note(f"warming up: {args.warmup} requests …")
    for _ in range(args.warmup):
        client.generation(requests.next())
    latencies, kept = {}, []
    for name, ask in (("generations", client.generation), ("jobs", client.job)):
        note(f"{args.requests} {name} one after another …")
        times = []
        for _ in range(args.requests):
            request = requests.next()
            took, image = ask(request)
            times.append(took)
        latencies[name] = times
        if name == "generations":
            kept.append((request, image))
    note(f"{args.jobs} concurrent jobs …")
    client, all_requests, ids, times = burst(server, requests, args.jobs)
    middle = len(ids) // 2
    job = json.loads(client.ask("GET", f"/v1/jobs/{ids[middle]}")[1])
    kept.append((all_requests[middle], client.file(job)))
    return latencies, times, kept


def unpacked(png):
    """Returns width, height and samples per pixel of a PNG, and its rows, still filtered."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n"):
        sys.exit("error: an image is not a PNG")
    at, header, packed = 8, None, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed += body
        at += length + 12
    width, height, depth, colour, _, _, interlaced = header
    if depth != 8 or colour not in (2, 6) or interlaced:
        sys.exit("error: only 8-bit RGB and RGBA PNGs are supported")
    return (width, height, 3 if colour == 2 else 4), zlib.decompress(packed)


def unfiltered(data, width, height, samples):
    stride, above, rows = width * samples, bytearray(width * samples), []
    for y in range(height):
        kind, row = data[y * (stride + 1)], bytearray(data[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        if kind == 2:
            row = bytearray((a + b) & 255 for a, b in zip(row, above))
        elif kind:
            for x in range(stride):
                left = row[x - samples] if x >= samples else 0
                up, corner = above[x], above[x - samples] if x >= samples else 0
                guess = {1: left, 3: (left + up) // 2}.get(kind)
                if guess is None:
                    distances = [(abs(up - corner), 0, left), (abs(left - corner), 1, up)]
                    guess = min(distances + [(abs(left + up - 2 * corner), 2, corner)])[2]
                row[x] = (row[x] + guess) & 255
        rows.append(bytes(row))
        above = row
    return b"".join(rows)


def check(args, kept):
    """Returns how many samples of each image differ from those of `kiln generate`."""
    differing = []
    with tempfile.TemporaryDirectory(prefix="kiln-serve-speed-") as folder:
        for number, (request, served) in enumerate(kept):
            note(f"the image with seed {request['seed']} with `kiln generate` …")
            path = os.path.join(folder, f"{number}.png")
            width, height = request["size"]
            command = [args.kiln, "generate", request["prompt"], "-m", args.model, *machine(args), "--no-cache"]
            command += ["-W", str(width), "-H", str(height), "-s", str(request["steps"]), "-S", str(request["seed"])]
            run(args, [*command, "-o", path])
            with open(path, "rb") as file:
                (shape, mine), (other_shape, other) = unpacked(file.read()), unpacked(served)
            if shape != other_shape:
                sys.exit(f"error: `kiln generate` wrote {shape[0]}x{shape[1]}, the server {other_shape[0]}x{other_shape[1]}")
            # Rows that are equal while filtered are equal; unfiltering takes seconds.
            if mine != other:
                mine, other = unfiltered(mine, *shape), unfiltered(other, *shape)
            differing.append(sum(a != b for a, b in zip(mine, other)) if mine != other else 0)
    return differing


def summary(args, report, times, latencies, burst_times):
    finished, jobs = burst_times["finished"], args.jobs
    allowed = 1 / (args.steps * times["step"] + times["decode"] + times["text"])
    whole = jobs / (finished[-1] - burst_times["began"])
    # Images of one batch may all finish within a millisecond.
    steady = (jobs - 1) / max(finished[-1] - finished[0], 0.001)
    medians = {name: statistics.median(seconds) for name, seconds in latencies.items()}
    return dict(
        kiln=report["kiln"], model=report["model"], backend=report["backend"], dtype=report["dtype"],
        width=args.size[0], height=args.size[1], steps=args.steps, text_tokens=report["text_tokens"],
        bench=times,
        one_after_another={
            name: dict(seconds=latencies[name], median=median, beyond_image=median - times["image"])
            for name, median in medians.items()
        },
        at_once=dict(
            jobs=jobs, submit_seconds=burst_times["submitted"] - burst_times["began"],
            images_per_second=whole, images_per_second_after_first=steady, allowed_per_second=allowed,
            share=whole / allowed, share_after_first=steady / allowed,
        ),
    )


def table(result):
    at_once = result["at_once"]
    head = "{model}, {width}x{height}, {steps} steps, {dtype}, {backend}".format(**result)
    lines = [head, "", f"{'bench':<34}{'ms':>10}"]
    lines += [f"  {name:<32}{seconds * 1000:>10.1f}" for name, seconds in result["bench"].items()]
    lines.append(f"{'one after another, median':<34}{'ms':>10}   over the bench's image")
    for name, seen in result["one_after_another"].items():
        lines.append(f"  {name:<32}{seen['median'] * 1000:>10.1f}   {seen['beyond_image'] * 1000:+.1f}")
    title = f"{at_once['jobs']} concurrent jobs"
    lines.append(f"{title:<34}{'images/s':>10}   of the phases' limit")
    lines.append(f"  {'first submit to last finish':<32}{at_once['images_per_second']:>10.3f}   {at_once['share']:.1%}")
    rate, share = at_once["images_per_second_after_first"], at_once["share_after_first"]
    lines.append(f"  {'first finish to last finish':<32}{rate:>10.3f}   {share:.1%}")
    lines.append(f"  {'1 / (steps·step + decode + text)':<32}{at_once['allowed_per_second']:>10.3f}")
    if "differing_samples" in result:
        counts = result["differing_samples"]
        verdict = "the same pixels" if not any(counts) else f"DIFFERENT, {counts} samples"
        lines.append(f"`kiln generate` again, {len(counts)} images: {verdict}")
    return "\n".join(lines)


def main():
    args = arguments()
    # Stop the server together with this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated"))
    report, times = bench(args)
    with Server(args) as server:
        latencies, burst_times, kept = measure(args, server)
    result = summary(args, report, times, latencies, burst_times)
    if args.check:
        result["differing_samples"] = check(args, kept)
    print(table(result), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(result, indent=1))
    sys.exit(1 if any(result.get("differing_samples", [])) else 0)


main()
