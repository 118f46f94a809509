"""A `kiln serve` for the tests beside this file, on a port and a data folder of its own."""

import atexit
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

kiln = os.path.abspath(sys.argv[1])


class Service:
    def __init__(self, *options, data=None, key=None):
        """Starts a server with these options on the folder `data`, or on a temporary one; `key` is its API key."""
        self.folder = None if data else tempfile.TemporaryDirectory()
        self.data, self.key = data or self.folder.name, key
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [kiln, "serve", "--port", "0", "--data", self.data, *(["--api-key", key] if key else []), *options]
        self.process = subprocess.Popen(command, stderr=self.log)
        # Leave no server behind if a test fails.
        atexit.register(self.process.kill)
        for _ in range(600):
            match = re.search(r"at http://127\.0\.0\.1:(\d+)", self.logged())
            if match:
                self.port = int(match.group(1))
                if self.send("GET", "/readyz")[0] == 200:
                    return
            time.sleep(0.1)
        sys.exit("the server did not start")

    def send(self, method, path, raw=None, content_type=None, key=None, timeout=120):
        """Sends bytes; returns the status and the bytes of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        key = self.key if key is None else key
        headers = {"content-type": content_type} if content_type else {}
        connection.request(method, path, raw, headers | ({"authorization": f"Bearer {key}"} if key else {}))
        response = connection.getresponse()
        return response.status, response.read()

    def call(self, method, path, body=None, **options):
        """Sends JSON; returns the status and the JSON of the answer."""
        raw = json.dumps(body).encode() if body is not None else None
        status, data = self.send(method, path, raw, "application/json" if raw else None, **options)
        return status, json.loads(data) if data else None

    def connect(self, text=b""):
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(text)
        return connection

    def health(self):
        """Seconds that /healthz takes; it must answer within one."""
        started = time.time()
        status, _ = self.send("GET", "/healthz", timeout=10)
        took = time.time() - started
        assert status == 200 and took < 1, f"/healthz: {status} after {took:.1f} s"
        return took

    def image(self):
        """Seconds that a small image takes."""
        started = time.time()
        status, answer = self.call("POST", "/v1/images/generations", {"prompt": "an apple", "size": "64x64", "steps": 1})
        assert status == 200, answer
        return time.time() - started

    def memory(self, field="VmRSS"):
        """Resident memory in MiB."""
        return int(re.search(rf"{field}:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1)) // 1024

    def forget_peak(self):
        """Lets `VmHWM` begin anew, where the kernel allows it."""
        try:
            with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass

    def logged(self):
        return open(self.log.name).read()

    def panics(self):
        return self.logged().count("panicked at")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def run(*tests):
    """Runs the tests that the command line names, or all."""
    for test in tests:
        if not sys.argv[2:] or test.__name__ in sys.argv[2:]:
            test()
