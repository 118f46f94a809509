"""What only a whole machine can show: a disk that fills up, a server that is killed again and again, clients that stop halfway or read next to nothing,
damaged inputs by the hundred, and requests made up from the server's own description.

Usage: faults.py KILN [disk_full killed halfway hostile made_up]       (root for the small disk; `pip install schemathesis` for the last)
"""

import atexit
import base64
import http.client
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib

kiln = os.path.abspath(sys.argv[1])


class Service:
    def __init__(self, data, *more):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [kiln, "serve", "--port", "0", "--data", data, "--max-steps", "4", "--max-side", "256", "-v", *more], stderr=self.log
        )
        # Whatever fails here: no server stays behind.
        atexit.register(self.process.kill)
        for _ in range(600):
            found = re.search(r"at http://127\.0\.0\.1:(\d+)", open(self.log.name).read())
            if found:
                self.port = int(found.group(1))
                if self.call("GET", "/readyz")[0] == 200:
                    return
            time.sleep(0.1)
        sys.exit("the server does not start")

    def call(self, method, path, body=None):
        raw = json.dumps(body).encode() if body is not None else None
        return self.send(method, path, raw, "application/json" if raw else None)

    def send(self, method, path, raw, kind):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, raw, {"content-type": kind} if kind else {})
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None

    def memory(self):
        """MiB of its own."""
        return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1)) / 1024

    def panics(self):
        return open(self.log.name).read().count("panicked at")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def disk_full():
    if os.geteuid() != 0 or not shutil.which("mount"):
        return print("disk full: skipped, a small disk needs root")
    folder = tempfile.mkdtemp()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", folder]) != 0:
        return print("disk full: skipped, no small disk can be mounted")
    try:
        service = Service(folder)
        order = {"prompt": "an apple", "size": "256x256"}
        status, made = 200, 0
        while status == 200 and made < 200:
            status, answer = service.call("POST", "/v1/images/generations", {**order, "steps": 1})
            made += status == 200
        assert status == 503 and answer["error"]["code"] == "storage", (status, answer)
        assert service.call("GET", "/healthz")[0] == 200
        gallery = service.call("GET", "/v1/pictures?limit=200")[1]["data"]
        assert len(gallery) == made, "every picture that was answered is there, and no other"
        for picture in gallery:
            assert service.call("DELETE", f"/v1/pictures/{picture['id']}")[0] == 204
        status, answer = service.call("POST", "/v1/images/generations", {**order, "steps": 1})
        assert status == 200, answer
        service.stop()
        print(f"disk full: all well, full after {made} pictures")
    finally:
        subprocess.call(["umount", "-l", folder])
        os.rmdir(folder)


def killed():
    """`kill -9` at any moment, ten times: every order is painted once, or said to have failed; none is lost."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        promised, service = {}, Service(folder)
        for _ in range(10):
            for _ in range(2):
                seed = len(promised) + 1
                status, answer = service.call("POST", "/v1/jobs", {"prompt": f"an apple {seed}", "seed": seed, "n": 2})
                assert status == 202, answer
                promised[answer["id"]] = seed
            time.sleep(chance.random() * 1.5)
            service.process.kill()
            service.process.wait()
            service = Service(folder)
        failed = 0
        for name, seed in promised.items():
            job = {"status": "queued"}
            while job["status"] in ("queued", "running"):
                status, job = service.call("GET", f"/v1/jobs/{name}")
                assert status == 200, job
                time.sleep(0.05)
            assert job["status"] in ("done", "failed"), job
            if job["status"] == "failed":
                assert job["error"]["code"] == "interrupted", job
                failed += 1
            else:
                assert len(job["pictures"]) == 2 and job["pictures"][0]["seed"] == str(seed), job
        kept = service.call("GET", "/v1/pictures?limit=200")[1]["data"]
        names = [picture["id"] for picture in kept]
        assert len(names) == len(set(names)) == 2 * (len(promised) - failed), (len(names), len(promised), failed)
        for picture in kept:
            connection = http.client.HTTPConnection("127.0.0.1", service.port)
            connection.request("GET", f"/v1/pictures/{picture['id']}/file")
            assert connection.getresponse().read().endswith(b"IEND\xaeB`\x82"), "a picture is cut off"
        service.stop()
        left = [name for name in os.listdir(os.path.join(folder, "pictures")) if name.endswith(".part")]
        print(f"killed ten times: all well, {len(promised) - failed} orders painted, {failed} given up after two tries, "
              f"{len(left)} parts of files left over")


def halfway():
    """Clients that send half a request, or read an answer a byte at a time, keep nobody else waiting."""
    with tempfile.TemporaryDirectory() as folder:
        service = Service(folder)
        body = json.dumps({"prompt": "an apple", "steps": 1, "size": "256x256"}).encode()
        head = lambda length: f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        stuck = []
        for number in range(60):
            stream = socket.create_connection(("127.0.0.1", service.port))
            stuck.append(stream)
            if number % 3 == 0:
                stream.sendall(head(len(body)).encode() + body[: len(body) // 2])
            elif number % 3 == 1:
                stream.sendall(head(len(body)).encode()[: 20 + number])
            else:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stream.sendall(head(len(body)).encode() + body)
        slowest = 0
        for _ in range(20):
            began = time.time()
            assert service.call("GET", "/healthz")[0] == 200
            slowest = max(slowest, time.time() - began)
            for stream in stuck[2::3]:
                stream.settimeout(0)
                try:
                    stream.recv(1)
                except BlockingIOError:
                    pass
            time.sleep(0.1)
        status, answer = service.call("POST", "/v1/images/generations", {"prompt": "a pear", "steps": 1})
        assert status == 200, answer
        # Longer than the server's patience: those who stopped are given up.
        time.sleep(35)
        given_up = 0
        for stream in stuck[0::3] + stuck[1::3]:
            stream.settimeout(1)
            try:
                given_up += len(stream.recv(4096)) >= 0
            except (TimeoutError, ConnectionError):
                pass
        assert given_up == 40, given_up
        assert service.panics() == 0 and service.memory() < 1500, service.memory()
        service.stop()
        print(f"halfway: all well, /healthz took {slowest * 1000:.0f} ms at most, {given_up} stalled requests given up")


def png(width, height):
    """A picture file by hand."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(3 * width)) for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def damaged(raw, chance):
    """The bytes with something wrong: cut, changed, doubled, or a number that is far too large."""
    raw = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw))
        match chance.randrange(5):
            case 0:
                del raw[at + 1 :]
            case 1:
                raw[at] = chance.randrange(256)
            case 2:
                raw[at:at] = raw[at : at + chance.randint(1, 40)]
            case 3:
                raw[at : at + 4] = b"\xff" * 4
            case 4:
                del raw[at : at + chance.randint(1, 40)]
        raw = raw or bytearray(b"?")
    return bytes(raw)


def hostile():
    """Damaged forms, JSON, pictures and LoRAs: refused one by one, without a panic, and the server paints on."""
    chance, rounds = random.Random(2), int(os.environ.get("ROUNDS", "300"))
    with tempfile.TemporaryDirectory() as folder:
        loras = os.path.join(folder, "loras")
        os.mkdir(loras)
        name = "transformer.single_transformer_blocks.0.attn.to_out.lora_{}.weight"
        header = {name.format(part): {"dtype": "F32", "shape": shape, "data_offsets": [i * 64, i * 64 + 64]}
                  for i, (part, shape) in enumerate([("A", [1, 16]), ("B", [16, 1])])}
        header = json.dumps(header).encode()
        file = struct.pack("<Q", len(header)) + header + bytes(128)
        for number in range(rounds // 10):
            with open(os.path.join(loras, f"l{number}.safetensors"), "wb") as out:
                out.write(damaged(file, chance))
        service = Service(os.path.join(folder, "data"), "--loras", loras)
        picture, seen = png(128, 112), {}
        edge = "----kiln"
        form = "".join(f'--{edge}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'
                       for k, v in {"prompt": "an apple", "steps": 1, "size": "128x128", "n": 1}.items()).encode()
        form += f'--{edge}\r\nContent-Disposition: form-data; name="image[]"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'.encode()
        form += picture + f"\r\n--{edge}--\r\n".encode()
        order = {"prompt": "an apple", "steps": 1, "size": "128x128", "n": 1, "seed": 7}
        text = base64.b64encode
        def tell(what, status, answer):
            seen.setdefault(what, {}).setdefault(status, 0)
            seen[what][status] += 1
            assert status < 500, (what, status, answer)
        for number in range(rounds):
            tell("form", *service.send("POST", "/v1/images/edits", damaged(form, chance), f"multipart/form-data; boundary={edge}"))
            tell("json", *service.send("POST", "/v1/images/generations", damaged(json.dumps(order).encode(), chance), "application/json"))
            source = "data:image/png;base64," + text(damaged(picture, chance)).decode()
            tell("picture", *service.call("POST", "/v1/images/generations", {**order, "references": [source]}))
            if number % 10 == 0:
                lora = [{"name": f"l{number // 10}", "weight": 1}]
                tell("lora", *service.call("POST", "/v1/images/generations", {**order, "loras": lora}))
        tell("whole form", *service.send("POST", "/v1/images/edits", form, f"multipart/form-data; boundary={edge}"))
        status, answer = service.call("POST", "/v1/images/generations", order)
        assert status == 200 and seen["whole form"] == {200: 1}, seen
        assert service.panics() == 0, open(service.log.name).read()[-3000:]
        service.stop()
        print(f"hostile: all well, answers by status {seen}")


def made_up():
    tool = shutil.which("schemathesis") or os.path.join(os.path.dirname(sys.executable), "schemathesis")
    if not os.path.exists(tool):
        return print("made-up requests: skipped, schemathesis is not installed")
    with tempfile.TemporaryDirectory() as folder:
        service = Service(folder)
        command = [tool, "run", f"http://127.0.0.1:{service.port}/openapi.json", "--checks", "not_a_server_error",
                   "--max-examples", os.environ.get("EXAMPLES", "20"), "--exclude-path-regex", "events$", "--request-timeout", "60"]
        code = subprocess.call(command)
        assert service.call("GET", "/healthz")[0] == 200
        service.stop()
        assert code == 0, "schemathesis found something"
        print("made-up requests: all well")


for fault in [disk_full, killed, halfway, hostile, made_up]:
    if not sys.argv[2:] or fault.__name__ in sys.argv[2:]:
        fault()
