"""What only a whole machine can show: a disk that fills up, and inputs made up from the server's own description.

Usage: faults.py KILN        (as root, for the small disk; `pip install schemathesis` for the rest)
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

kiln = os.path.abspath(sys.argv[1])


class Service:
    def __init__(self, data):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [kiln, "serve", "--port", "0", "--data", data, "--max-steps", "4", "--max-side", "256", "-v"], stderr=self.log
        )
        for _ in range(600):
            found = re.search(r"at http://127\.0\.0\.1:(\d+)", open(self.log.name).read())
            if found:
                self.port = int(found.group(1))
                if self.call("GET", "/readyz")[0] == 200:
                    return
            time.sleep(0.1)
        sys.exit("the server does not start")

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"content-type": "application/json"} if body is not None else {}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None

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


if "--only-made-up" not in sys.argv:
    disk_full()
made_up()
