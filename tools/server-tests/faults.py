"""Fault tests of `kiln serve`: a full disk, `kill -9`, stalled clients, damaged inputs, and requests generated from its OpenAPI description.

Usage: faults.py KILN [disk_full killed stalled damaged_inputs schema]       (disk_full needs root, schema needs `pip install schemathesis`)
"""

import base64
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib

from service import Service, run


def start(folder, *options):
    return Service("--max-steps", "4", "--max-side", "256", "-v", *options, data=folder)


def disk_full():
    if os.geteuid() != 0 or not shutil.which("mount"):
        return print("disk full: skipped, mounting a small disk requires root")
    folder = tempfile.mkdtemp()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", folder]) != 0:
        return print("disk full: skipped, failed to mount a small disk")
    try:
        service = start(folder)
        request = {"prompt": "an apple", "size": "256x256", "steps": 1}
        status, generated = 200, 0
        while status == 200 and generated < 200:
            status, answer = service.call("POST", "/v1/images/generations", request)
            generated += status == 200
        assert status == 503 and answer["error"]["code"] == "storage", (status, answer)
        assert service.call("GET", "/healthz")[0] == 200
        states = {job["status"] for job in service.call("GET", "/v1/jobs?limit=1000")[1]["data"]}
        assert states <= {"done", "failed"}, f"ended jobs are shown as ended: {states}"
        filler = os.path.join(folder, "filler")
        try:
            with open(filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError:
            pass
        time.sleep(1.1)  # the result of the last check is used for a second
        status, answer = service.call("GET", "/readyz")
        assert (status, answer["status"]) == (503, "storage"), (status, answer)
        if os.path.exists(filler):
            os.remove(filler)
        gallery = service.call("GET", "/v1/images?limit=200")[1]["data"]
        assert len(gallery) == generated, "the gallery holds exactly the images that were returned"
        for image in gallery:
            assert service.call("DELETE", f"/v1/images/{image['id']}")[0] == 204
        status, answer = service.call("POST", "/v1/images/generations", request)
        assert status == 200, answer
        service.stop()
        print(f"disk full: passed, full after {generated} images")
    finally:
        subprocess.call(["umount", "-l", folder])
        os.rmdir(folder)


def killed():
    """`kill -9` at random moments, `ROUNDS` times (10; 1000 take an hour): every job is done once or reported as failed; none is lost."""
    rng, rounds = random.Random(1), int(os.environ.get("ROUNDS", "10"))
    # A server forgets jobs without images beyond the newest thousand.
    while rounds > 0:
        killed_in_one_folder(rng, min(rounds, 250))
        rounds -= 250


def killed_in_one_folder(rng, rounds):
    request = {"n": 2, "width": 64, "height": 64, "steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        accepted, service = {}, start(folder)
        for _ in range(rounds):
            while len(service.call("GET", "/v1/queue")[1]["data"]) > 8:
                time.sleep(0.1)
            for _ in range(rng.randint(0, 2)):
                seed = len(accepted) + 1
                status, answer = service.call("POST", "/v1/jobs", {**request, "prompt": f"an apple {seed}", "seed": seed})
                assert status == 202, answer
                accepted[answer["id"]] = seed
            time.sleep(rng.random())
            service.process.kill()
            service.process.wait()
            service = start(folder)
        failed, expected = 0, []
        for job_id, seed in accepted.items():
            job = {"status": "queued"}
            while job["status"] in ("queued", "running"):
                status, job = service.call("GET", f"/v1/jobs/{job_id}")
                assert status == 200, job
                time.sleep(0.05)
            assert job["status"] in ("done", "failed"), job
            if job["status"] == "failed":
                assert job["error"]["code"] == "interrupted", job
                failed += 1
            else:
                assert [image["seed"] for image in job["images"]] == [str(seed), str(seed + 1)], job
            # A failed job keeps the images that it completed.
            expected += [image["id"] for image in job["images"]]
        images, more = [], True
        while more:
            before = f"&before={images[-1]['id']}" if images else ""
            page = service.call("GET", f"/v1/images?limit=200{before}")[1]
            images, more = images + page["data"], page["more"]
        ids = [image["id"] for image in images]
        assert len(ids) == len(set(ids)) and sorted(ids) == sorted(expected), (len(ids), len(expected), len(accepted), failed)
        for image in images:
            assert service.send("GET", f"/v1/images/{image['id']}/file")[1].endswith(b"IEND\xaeB`\x82"), "a file is truncated"
        service.stop()
        unfinished = [name for name in os.listdir(os.path.join(folder, "pictures")) if name.startswith(".kiln-")]
        print(f"killed {rounds} times: passed, {len(accepted) - failed} jobs done, {failed} failed after two attempts, "
              f"{len(unfinished)} unfinished files left over", flush=True)


def stalled():
    """Clients that send half a request, or read a response byte by byte, don't block others."""
    with tempfile.TemporaryDirectory() as folder:
        service = start(folder)
        body = json.dumps({"prompt": "an apple", "steps": 1, "size": "256x256"}).encode()
        head = lambda length: f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        streams = []
        for number in range(60):
            stream = socket.create_connection(("127.0.0.1", service.port))
            streams.append(stream)
            if number % 3 == 0:
                stream.sendall(head(len(body)).encode() + body[: len(body) // 2])
            elif number % 3 == 1:
                stream.sendall(head(len(body)).encode()[: 20 + number])
            else:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stream.sendall(head(len(body)).encode() + body)
        slowest = 0
        for _ in range(20):
            started = time.time()
            assert service.call("GET", "/healthz")[0] == 200
            slowest = max(slowest, time.time() - started)
            for stream in streams[2::3]:
                stream.settimeout(0)
                try:
                    stream.recv(1)
                except BlockingIOError:
                    pass
            time.sleep(0.1)
        status, answer = service.call("POST", "/v1/images/generations", {"prompt": "a pear", "steps": 1})
        assert status == 200, answer
        # Longer than the server's timeout: it closes the stalled connections.
        time.sleep(35)
        closed = 0
        for stream in streams[0::3] + streams[1::3]:
            stream.settimeout(1)
            try:
                closed += len(stream.recv(4096)) >= 0
            except (TimeoutError, ConnectionError):
                pass
        assert closed == 40, closed
        assert service.panics() == 0 and service.memory() < 1500, service.memory()
        service.stop()
        print(f"stalled: passed, /healthz took at most {slowest * 1000:.0f} ms, {closed} stalled connections closed")


def png(width, height):
    """An RGB PNG file."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(3 * width)) for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def damage(raw, rng):
    """Damages the bytes: truncates, changes, duplicates or removes some, or inserts a huge number."""
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(5):
            case 0:
                del raw[at + 1 :]
            case 1:
                raw[at] = rng.randrange(256)
            case 2:
                raw[at:at] = raw[at : at + rng.randint(1, 40)]
            case 3:
                raw[at : at + 4] = b"\xff" * 4
            case 4:
                del raw[at : at + rng.randint(1, 40)]
        raw = raw or bytearray(b"?")
    return bytes(raw)


def damaged_inputs():
    """Damaged forms, JSON, images and LoRAs: rejected without a panic, and the server keeps working."""
    rng, rounds = random.Random(2), int(os.environ.get("ROUNDS", "300"))
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
                out.write(damage(file, rng))
        service = start(os.path.join(folder, "data"), "--loras", loras)
        image, statuses = png(128, 112), {}
        boundary = "----kiln"
        form = "".join(f'--{boundary}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'
                       for k, v in {"prompt": "an apple", "steps": 1, "size": "128x128", "n": 1}.items()).encode()
        form += f'--{boundary}\r\nContent-Disposition: form-data; name="image[]"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'.encode()
        form += image + f"\r\n--{boundary}--\r\n".encode()
        request = {"prompt": "an apple", "steps": 1, "size": "128x128", "n": 1, "seed": 7}
        def check(what, status, answer):
            statuses.setdefault(what, {}).setdefault(status, 0)
            statuses[what][status] += 1
            # A damaged LoRA is the server's own file: its name is in the answer.
            error = answer["error"] if what == "lora" and status >= 500 else {}
            is_named = error.get("code") == "generation_failed" and ".safetensors`" in error["message"]
            assert status < 500 or is_named, (what, status, answer)
        for number in range(rounds):
            check("form", *service.send("POST", "/v1/images/edits", damage(form, rng), f"multipart/form-data; boundary={boundary}"))
            check("json", *service.send("POST", "/v1/images/generations", damage(json.dumps(request).encode(), rng), "application/json"))
            source = "data:image/png;base64," + base64.b64encode(damage(image, rng)).decode()
            check("image", *service.call("POST", "/v1/images/generations", {**request, "references": [source]}))
            if number % 10 == 0:
                lora = [{"name": f"l{number // 10}", "weight": 1}]
                check("lora", *service.call("POST", "/v1/images/generations", {**request, "loras": lora}))
        check("valid form", *service.send("POST", "/v1/images/edits", form, f"multipart/form-data; boundary={boundary}"))
        status, answer = service.call("POST", "/v1/images/generations", request)
        assert status == 200 and statuses["valid form"] == {200: 1}, statuses
        assert service.panics() == 0, service.logged()[-3000:]
        service.stop()
        print(f"damaged inputs: passed, responses by status {statuses}")


def schema():
    """Requests that schemathesis generates from the OpenAPI description."""
    tool = shutil.which("schemathesis") or os.path.join(os.path.dirname(sys.executable), "schemathesis")
    if not os.path.exists(tool):
        return print("schema: skipped, schemathesis is not installed")
    with tempfile.TemporaryDirectory() as folder:
        service = start(folder)
        command = [tool, "run", f"http://127.0.0.1:{service.port}/openapi.json", "--checks", "not_a_server_error",
                   "--max-examples", os.environ.get("EXAMPLES", "20"), "--exclude-path-regex", "events$", "--request-timeout", "60"]
        code = subprocess.call(command)
        assert service.call("GET", "/healthz")[0] == 200
        service.stop()
        assert code == 0, "schemathesis reported failures"
        print("schema: passed")


run(disk_full, killed, stalled, damaged_inputs, schema)
