"""Checks `/openapi.json` with openapi-spec-validator, generates a Python client from it, and uses that client.

Usage: openapi_client.py http://127.0.0.1:7860 [KEY]
"""

import importlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openapi_spec_validator

address, key = sys.argv[1], (sys.argv + ["none"])[2]
description = json.load(urllib.request.urlopen(f"{address}/openapi.json"))
openapi_spec_validator.validate(description)

with tempfile.TemporaryDirectory() as folder:
    file, config, client = (Path(folder, name) for name in ("openapi.json", "config.json", "kiln_client"))
    file.write_text(json.dumps(description))
    # The generator knows no images.
    binary = {media_type: "application/octet-stream" for media_type in ("image/*", "image/jpeg")}
    config.write_text(json.dumps({"content_type_overrides": binary, "post_hooks": []}))
    command = ["openapi_python_client", "generate", "--path", file, "--config", config, "--output-path", client]
    command += ["--meta", "none", "--fail-on-warning"]
    generated = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True)
    if generated.returncode:
        raise SystemExit(generated.stdout + generated.stderr)
    sys.path.insert(0, folder)
    kiln = importlib.import_module("kiln_client")
    call = lambda tag, name: importlib.import_module(f"kiln_client.api.{tag}.{name}")
    models = importlib.import_module("kiln_client.models")
    server = kiln.AuthenticatedClient(base_url=address, token=key, raise_on_unexpected_status=True)

    assert call("openai", "openai_models").sync(client=server).data
    body = models.JobRequest.from_dict({"prompt": "a red apple", "steps": 1, "width": 64, "height": 64, "seed": 7})
    job = call("jobs", "jobs_submit").sync(client=server, body=body)
    while job.status in ("queued", "running"):
        time.sleep(0.05)
        job = call("jobs", "jobs_status").sync(job.id, client=server)
    assert job.status == "done" and job.images[0].seed == "7", job
    listed = call("gallery", "gallery_list").sync(client=server)
    assert any(image.id == job.images[0].id for image in listed.data)
    missing = call("jobs", "jobs_status").sync_detailed("nothing", client=server)
    assert missing.status_code == 404

print("openapi client: passed")
