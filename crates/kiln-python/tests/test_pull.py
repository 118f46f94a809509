"""Downloads, from a hub of the test's own."""

import hashlib
import http.server
import json
import os
import pathlib
import tempfile
import threading

import kiln
from common import SMALL, path, raises

REPO = "somebody/tiny-klein"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    files = {}

    def do_GET(self):
        if self.path.startswith(f"/api/models/{REPO}/revision/"):
            lfs = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in Hub.files.items()}
            listed = [{"rfilename": name, "lfs": about} for name, about in lfs.items()]
            return self.reply(json.dumps({"sha": COMMIT, "siblings": listed}).encode())
        data = Hub.files.get(self.path.split(f"/{REPO}/resolve/{COMMIT}/")[-1].split("?")[0])
        if data is None:
            return self.send_error(404)
        self.reply(data)

    def reply(self, data):
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_models_are_pulled_with_progress_and_can_be_used():
    folder = pathlib.Path(path("klein"))
    Hub.files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    before = {name: os.environ.get(name) for name in ("HF_ENDPOINT", "HF_HOME")}
    os.environ.update(HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_HOME=tempfile.mkdtemp())
    try:
        raises(kiln.ModelError, "nobody", kiln.pull, "nobody/nothing")

        def stop(*_):
            raise ZeroDivisionError("stop")

        raises(ZeroDivisionError, "stop", kiln.pull, REPO, progress=stop)
        told = []
        summary = kiln.pull(REPO, accept_license=True, progress=lambda file, done, total: told.append((done, total)))
        assert summary["commit"] == COMMIT and summary["files"] > 3
        assert told[-1][0] == told[-1][1] == summary["bytes"]
        [image] = kiln.load(REPO, dtype="f32", device="cpu").generate("a fox", **SMALL)
        assert image.width == 64
        assert kiln.pull(REPO, accept_license=True)["downloaded"] == 0
    finally:
        hub.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
