#!/usr/bin/env python3
"""Load test of `kiln serve`: many concurrent clients, with the smallest model.

    bench/serve_load.py [--kiln target/release/kiln] [--clients 64] [--seconds 60]

Starts a server on a free port with an empty data folder. Every client requests images one after the other, alternating
between `/v1/images/generations` and `/v1/jobs`, while `/healthz` is polled. Prints a summary. Fails if an image is lost
or duplicated, if the 99th percentile of `/healthz` exceeds 50 ms, if memory keeps growing, or if a full queue does not
respond with 429 and `Retry-After`. Needs only Python.
"""

import argparse
import base64
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--kiln", default="target/release/kiln")
options.add_argument("--clients", type=int, default=64)
options.add_argument("--seconds", type=float, default=60)
options.add_argument("--size", default="128x128")
options.add_argument("--steps", type=int, default=1)
options.add_argument("--queue", type=int, default=48)
options.add_argument("--max-batch", type=int, help="the option of `kiln serve`")
options = options.parse_args()


def call(port, method, path, body=None, client=None, timeout=300):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"content-type": "application/json"} if body is not None else {}
    if client:
        headers["x-client-id"] = client
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), data


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.promised, self.got, self.full, self.errors = [], [], 0, []
        self.health = []


def painter(port, number, end, tally):
    """A client: sends requests, waits when the queue is full, and checks that each response is its own."""
    name, seed = f"client-{number}", number * 1_000_000
    while time.time() < end:
        seed += 1
        by_job = seed % 2
        request = {"prompt": f"apple {number}", "seed": seed, "steps": options.steps}
        try:
            if by_job:
                width, height = map(int, options.size.split("x"))
                status, headers, data = call(port, "POST", "/v1/jobs", {**request, "width": width, "height": height}, name)
            else:
                status, headers, data = call(
                    port, "POST", "/v1/images/generations", {**request, "size": options.size}, name
                )
        except OSError as error:
            with tally.lock:
                tally.errors.append(f"no response: {error}")
            continue
        if status == 429:
            wait = headers.get("retry-after") or headers.get("Retry-After")
            with tally.lock:
                tally.full += 1
                if not wait or int(wait) < 1:
                    tally.errors.append("429 without Retry-After")
            # Wait at most briefly, whatever Retry-After says.
            time.sleep(min(float(wait or 1), 2))
            continue
        if status not in (200, 202):
            with tally.lock:
                tally.errors.append(f"{status}: {data[:200]}")
            continue
        response = json.loads(data)
        if by_job:
            while True:
                status, _, data = call(port, "GET", f"/v1/jobs/{response['id']}", client=name)
                response = json.loads(data)
                if response["status"] not in ("queued", "running"):
                    break
                time.sleep(0.2)
            images = [(p["id"], int(p["seed"])) for p in response["images"]]
        else:
            images = [(p["id"], int(p["seed"])) for p in response["data"]]
            if not base64.b64decode(response["data"][0]["b64_json"]).startswith(b"\x89PNG"):
                images = []
        with tally.lock:
            tally.promised.append(seed)
            tally.got.extend(images)
            if [s for _, s in images] != [seed]:
                tally.errors.append(f"requested seed {seed}, got {images}: {response.get('error')}")


def doctor(port, end, tally):
    while time.time() < end:
        began = time.perf_counter()
        status, _, _ = call(port, "GET", "/healthz")
        took = time.perf_counter() - began
        with tally.lock:
            tally.health.append(took)
            if status != 200:
                tally.errors.append(f"/healthz: {status}")
        time.sleep(0.05)


def resident(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{pid}/status").read()).group(1)) / 1024


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [options.kiln, "serve", "--port", "0", "--data", folder, "--queue", str(options.queue)]
        if options.max_batch:
            command += ["--max-batch", str(options.max_batch)]
        log = open(os.path.join(folder, "log"), "w+")
        server = subprocess.Popen(command, stderr=log)
        port = None
        for _ in range(300):
            time.sleep(0.1)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", open(log.name).read())
            if found:
                port = int(found.group(1))
                try:
                    if call(port, "GET", "/readyz")[0] == 200:
                        break
                except OSError:
                    pass
        if port is None:
            sys.exit("the server did not start")
        tally, end = Tally(), time.time() + options.seconds
        threads = [threading.Thread(target=painter, args=(port, i, end, tally)) for i in range(options.clients)]
        threads.append(threading.Thread(target=doctor, args=(port, end, tally)))
        memory = []
        began = time.time()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.append(resident(server.pid))
            time.sleep(0.5)
        took = time.time() - began
        kept = json.loads(call(port, "GET", "/v1/images?limit=200")[2])
        images = list(kept["data"])
        while kept["more"]:
            kept = json.loads(call(port, "GET", f"/v1/images?limit=200&before={images[-1]['id']}")[2])
            images += kept["data"]
        metrics = call(port, "GET", "/metrics")[2].decode()
        server.terminate()
        server.wait(60)

    health = sorted(tally.health)
    p99 = health[int(len(health) * 0.99)] * 1000
    ids = [image["id"] for image in images]
    seeds = sorted(int(image["seed"]) for image in images)
    third = max(1, len(memory) // 3)
    growth = max(memory[-third:]) - max(memory[:third])
    print(f"{options.clients} clients, {took:.0f} s, {options.size}, {options.steps} steps, queue of {options.queue}")
    print(f"images: {len(tally.got)} received, {len(images)} stored, {len(tally.got) / took:.1f} per second")
    batches = re.findall(r'kiln_batch_images_total\{size="(\d+)"\} (\d+)', metrics)
    print("batches: " + ", ".join(f"{count} images in batches of {size}" for size, count in batches))
    print(f"rejected with 429: {tally.full}")
    print(f"/healthz: {len(health)} requests, median {health[len(health) // 2] * 1000:.1f} ms, p99 {p99:.1f} ms, "
          f"worst {health[-1] * 1000:.1f} ms")
    print(f"memory: {memory[0]:.0f} MiB at start, {max(memory):.0f} peak, {growth:+.0f} from the first third to the last")
    problems = list(tally.errors)
    if sorted(tally.promised) != seeds or len(set(ids)) != len(ids):
        lost = set(tally.promised) - set(seeds)
        problems.append(f"lost {len(lost)}, doubled {len(ids) - len(set(ids))}, unasked {len(set(seeds) - set(tally.promised))}")
    if p99 > 50:
        problems.append(f"/healthz took {p99:.0f} ms at the 99th percentile, at most 50 are allowed")
    if growth > 200:
        problems.append(f"memory grew by {growth:.0f} MiB")
    if options.clients > options.queue + 8 and not tally.full:
        problems.append("the queue was never full")
    for problem in problems[:10]:
        print("FAIL:", problem)
    print("failed" if problems else "passed")
    sys.exit(1 if problems else 0)


main()
