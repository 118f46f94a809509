"""Attacks on `kiln serve`, with bounds on memory, on time and on /healthz.

Usage: attacks.py KILN [drips bombs hostile idle methods guesses hangups wildcards forms unread searches]
"""

import base64
import json
import struct
import threading
import time
import zlib

import hostile_files
from service import Service, run

KEY = "an-api-key-of-the-tests"


def drips():
    """Bodies that are announced with 64 MiB and arrive byte by byte."""
    service = Service(key=KEY)
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
    service = Service(key=KEY)
    service.image()
    for side, expected in [(8192, {400}), (5000, {201, 503})]:
        before, statuses = service.memory("VmHWM"), []
        files = [deep_png(side, seed) for seed in range(2)]
        send = lambda n: statuses.append(service.send("POST", "/v1/inputs", files[n % 2] + bytes([n]))[0])
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


def hostile():
    """Ten uploads at once of every file that asks for more than it seems to, and a training with it."""
    service = Service("--train", key=KEY)
    service.image()

    def check(file):
        image = {"image": base64.b64encode(file).decode(), "caption": "a"}
        body = {"request": {"name": "a", "steps": 1}, "images": [image] * 2}
        return service.call("POST", "/v1/trainings/check", body)[0]

    # The base model of a training takes memory, whatever the images are.
    check(hostile_files.png(size=(256, 256)))
    for name, file in hostile_files.files().items():
        service.forget_peak()
        before, statuses = service.memory("VmHWM"), []
        send = lambda n: statuses.append(service.send("POST", "/v1/inputs", file + bytes([n]))[0])
        threads = [threading.Thread(target=send, args=[n]) for n in range(10)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        statuses.append(check(file + b"x"))
        peak = service.memory("VmHWM")
        counts = {status: statuses.count(status) for status in sorted(set(statuses))}
        print(f"hostile: {name}, {len(file) >> 10} KiB: {counts}, peak {peak} MiB (before {before})")
        # The budget for decoding, and the bodies.
        assert peak - before < 1024 + 256 and 500 not in counts, (name, before, peak, counts)
    service.stop()


def idle():
    """More idle connections than there are places."""
    service = Service(key=KEY)
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
    service = Service(key=KEY)
    for n in range(200):
        service.send(f"BREW{n}", "/healthz", key="")
    status, text = service.send("GET", "/metrics")
    assert status == 200 and b"BREW" not in text and b'method="other"' in text
    service.stop()
    print("methods: passed")


def guesses():
    """Wrong keys, from 32 connections at once."""
    service = Service(key=KEY)
    tried, end = [], time.time() + 5

    def guess():
        while time.time() < end:
            tried.append(service.send("GET", "/v1/models", key="a-wrong-key")[0])

    threads = [threading.Thread(target=guess) for _ in range(32)]
    [thread.start() for thread in threads]
    health = service.health()
    [thread.join() for thread in threads]
    compared = tried.count(401)
    assert compared < 50 and set(tried) <= {401, 429}, (compared, set(tried))
    service.stop()
    print(f"guesses: {compared} keys compared in 5 s, {tried.count(429)} refused unseen, /healthz {health * 1000:.0f} ms")


def hangups():
    """Wrong keys of a client that hangs up when no answer comes: right keys are answered at once."""
    service = Service(key=KEY)
    compared, end = [], time.time() + 5
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-wrong-key\r\n\r\n"

    def guess():
        while time.time() < end:
            connection = service.connect(head)
            # Less than the first delay.
            connection.settimeout(0.2)
            try:
                connection.recv(12)
            except TimeoutError:
                compared.append(True)
            connection.close()

    threads = [threading.Thread(target=guess) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(compared) < 50, len(compared)
    service.stop()
    print(f"hangups: {len(compared)} keys compared in 5 s")


def wildcards():
    """Prompts whose wildcards multiply, never end, or lie deep within each other."""
    service = Service(key=KEY)
    before, state, choices = service.memory(), 7, []
    for _ in range(1900):
        # The alternatives that seed 7 chooses (SplitMix64): the prompt leads to its innermost ones.
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        choices.append((mixed ^ mixed >> 31) >> 63)
    deep = "".join("{|" if choice else "{" for choice in choices) + "a"
    deep += "".join("}" if choice else "|}" for choice in reversed(choices))
    jobs = [{"prompt": "{a|b}" + "x" * 7000, "n": 100_000}, {"prompt": "{" * 1_000_000}, {"prompt": deep, "seed": 7}]
    started = time.time()
    for job in jobs:
        status, answer = service.call("POST", "/v1/jobs?wildcards=true", job)
        assert status == 400, (status, answer)
    took, grown = time.time() - started, service.memory() - before
    assert took < 10 and grown < 64, (took, grown)
    service.stop()
    print(f"wildcards: {len(jobs)} refused in {took:.2f} s, {grown} MiB more")


def forms():
    """A form whose text is a list of millions of values."""
    service = Service(key=KEY)
    text = b"1," * 15_000_000 + b"1"
    form = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + text + b"\r\n--b--\r\n"
    status, answer = service.send("POST", "/v1/images/edits", form, "multipart/form-data; boundary=b")
    peak = service.memory("VmHWM")
    assert status == 400 and peak < 500, (status, answer, peak)
    service.stop()
    print(f"forms: {len(form) >> 20} MiB of values refused, peak {peak} MiB")


def unread():
    """Clients that ask for a large file and don't read it."""
    service = Service(key=KEY)
    side = 3000
    header = struct.pack("<IHHI", 54 + side * side * 3, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, *[0] * 6)
    status, answer = service.send("POST", "/v1/inputs", b"BM" + header + bytes(side * side * 3))
    assert status == 201, answer
    name, before = json.loads(answer)["id"], service.memory()
    head = f"GET /v1/inputs/{name} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    held = [service.connect(head.encode()) for _ in range(100)]
    time.sleep(2)
    health, grown = service.health(), service.memory() - before
    assert grown < 200, grown
    service.stop()
    print(f"unread: {len(held)} clients of a file of 26 MiB, {grown} MiB more, /healthz {health * 1000:.0f} ms")


def searches():
    """A search that compares every letter of long prompts with every letter of a long word."""
    service = Service(key=KEY)
    request = {"prompt": ["a" * 8000] * 10, "size": "64x64", "steps": 1, "response_format": "url"}
    for _ in range(2):
        assert service.call("POST", "/v1/images/generations", request)[0] == 200
    started = time.time()
    long, short = (service.send("GET", f"/v1/images?search={'a' * length}b")[0] for length in (3999, 255))
    took = time.time() - started
    assert (long, short) == (400, 200) and took < 5, (long, short, took)
    service.stop()
    print(f"searches: {took:.2f} s")


run(drips, bombs, hostile, idle, methods, guesses, hangups, wildcards, forms, unread, searches)
