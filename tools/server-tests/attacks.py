"""Attacks on `kiln serve`, with bounds on memory, on time and on /healthz.

Usage: attacks.py KILN [drips bombs idle methods guesses]
"""

import atexit
import http.client
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

kiln = os.path.abspath(sys.argv[1])
KEY = "an-api-key-of-the-tests"


class Service:
    def __init__(self, *options):
        self.data = tempfile.TemporaryDirectory()
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [kiln, "serve", "--port", "0", "--data", self.data.name, "--api-key", KEY, *options]
        self.process = subprocess.Popen(command, stderr=self.log)
        atexit.register(self.process.kill)
        for _ in range(600):
            match = re.search(r"at http://127\.0\.0\.1:(\d+)", open(self.log.name).read())
            if match:
                self.port = int(match.group(1))
                if self.call("GET", "/readyz")[0] == 200:
                    return
            time.sleep(0.1)
        sys.exit("the server did not start")

    def call(self, method, path, body=None, key=KEY, timeout=120):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        raw = json.dumps(body) if isinstance(body, dict) else body
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, raw, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def memory(self, field="VmRSS"):
        """Resident memory in MiB."""
        return int(re.search(rf"{field}:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1)) // 1024

    def health(self):
        """Seconds that /healthz takes; it must answer within one."""
        started = time.time()
        status, _ = self.call("GET", "/healthz", timeout=10)
        took = time.time() - started
        assert status == 200 and took < 1, f"/healthz: {status} after {took:.1f} s"
        return took

    def image(self):
        """Seconds that a small image takes."""
        started = time.time()
        request = {"prompt": "an apple", "size": "64x64", "steps": 1}
        status, answer = self.call("POST", "/v1/images/generations", request)
        assert status == 200, answer
        return time.time() - started

    def connect(self, text=b""):
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(text)
        return connection

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def drips():
    """Bodies that are announced with 64 MiB and arrive byte by byte."""
    service = Service()
    usual, before = service.image(), service.memory()
    head = f"POST /v1/inputs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {64 << 20}\r\n\r\n"
    connections = [service.connect(head.encode()) for _ in range(64)]
    for connection in connections:
        connection.sendall(b"x")
    health, took, grown = service.health(), service.image(), service.memory() - before
    assert took < usual + 5 and grown < 64, (took, grown)
    service.stop()
    print(f"drips: an image takes {took:.2f} s beside 64 drips ({usual:.2f} s alone), /healthz {health * 1000:.0f} ms, {grown} MiB more")


def deep_png(side, seed):
    """A PNG of RGBA with 16 bits each, of one colour."""
    chunk = lambda kind, raw: struct.pack(">I", len(raw)) + kind + raw + struct.pack(">I", zlib.crc32(kind + raw))
    packer = zlib.compressobj(6)
    row = bytes(1) + struct.pack(">4H", seed, 0, 0, 65535) * side
    raw = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", raw) + chunk(b"IEND", b"")


def bombs():
    """Twenty small files of large images at once: too large ones are refused, large ones are decoded a few at a time."""
    service = Service()
    service.image()
    for side, expected in [(8192, {400}), (5000, {201, 503})]:
        before, statuses = service.memory("VmHWM"), []
        files = [deep_png(side, seed) for seed in range(2)]
        send = lambda n: statuses.append(service.call("POST", "/v1/inputs", files[n % 2] + bytes([n]))[0])
        threads = [threading.Thread(target=send, args=[n]) for n in range(20)]
        [thread.start() for thread in threads]
        slowest = 0
        while any(thread.is_alive() for thread in threads):
            slowest = max(slowest, service.health())
            time.sleep(0.1)
        peak = service.memory("VmHWM")
        assert set(statuses) <= expected and peak - before < 1800, (statuses, before, peak)
        counts = {status: statuses.count(status) for status in set(statuses)}
        print(f"bombs: 20 images of {side}², {len(files[0]) >> 10} KiB each: {counts}, peak {peak} MiB (before {before}), /healthz {slowest * 1000:.0f} ms")
    service.stop()


def idle():
    """More idle connections than there are places."""
    service = Service()
    held = []
    for n in range(700):
        try:
            held.append(service.connect(b"GET / HTTP/1.1\r\nHost: " if n % 2 else b""))
        except OSError:
            break
    health, took = service.health(), service.image()
    assert took < 10, took
    service.stop()
    print(f"idle: beside {len(held)} idle connections /healthz {health * 1000:.0f} ms, an image {took:.2f} s")


def methods():
    """Made-up methods must not become labels."""
    service = Service()
    for n in range(200):
        service.call(f"BREW{n}", "/healthz", key="")
    status, text = service.call("GET", "/metrics")
    assert status == 200 and b"BREW" not in text and b'method="other"' in text
    service.stop()
    print("methods: passed")


def guesses():
    """Wrong keys, from 32 connections at once."""
    service = Service()
    tried, end = [], time.time() + 5

    def guess():
        while time.time() < end:
            tried.append(service.call("GET", "/v1/models", key="a-wrong-key")[0])

    threads = [threading.Thread(target=guess) for _ in range(32)]
    [thread.start() for thread in threads]
    health = service.health()
    [thread.join() for thread in threads]
    compared = tried.count(401)
    assert compared < 50 and set(tried) <= {401, 429}, (compared, set(tried))
    service.stop()
    print(f"guesses: {compared} keys compared in 5 s, {tried.count(429)} refused unseen, /healthz {health * 1000:.0f} ms")


for test in [drips, bombs, idle, methods, guesses]:
    if not sys.argv[2:] or test.__name__ in sys.argv[2:]:
        test()
