#!/usr/bin/env python3
"""Compares `kiln verify` with another validator, and checks what edits of signed images carry.   check_verify.py KILN [COPIES]

Needs `pip install c2pa-python encypher-c2pa`, cargo, and a program with the feature `verify`. Signs images that are made from
signed ones (`kiln-credentials/examples/carry.rs`) and asks both validators for `Trusted` with the ingredients' manifests, and
with what is wrong with them. Then COPIES (default 10000) with one changed, cut or added piece: none may crash `kiln verify`,
and none may stay valid, but for changes of bytes of the store that nobody signs (names and lengths of boxes). It prints
what c2pa-python finds worse.
"""

import io
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import c2pa
import encypher_c2pa
from tampering import tampered

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEDIA = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}
UNKNOWN = "signingCredential.untrusted"
# Of each file: how many manifests it has, and what is wrong with its ingredients.
EDITS = {
    "initial": (2, [{UNKNOWN}]),
    "references": (3, [{UNKNOWN}, {UNKNOWN}]),
    "twice": (2, [{UNKNOWN}, {UNKNOWN}]),
    "again": (4, [{UNKNOWN}, {UNKNOWN}]),
    "changed": (2, [{"assertion.dataHash.mismatch", UNKNOWN}]),
    "forged": (2, [{"claimSignature.mismatch", UNKNOWN}]),
}
BATCH = 500


def read(data, suffix, root):
    """What c2pa-python says of a file; nothing if it has no credentials that can be read."""
    settings = c2pa.Settings.from_dict({"verify": {"verify_trust": True}, "trust": {"user_anchors": root}})
    try:
        return json.loads(c2pa.Reader(MEDIA[suffix], io.BytesIO(data), context=c2pa.Context(settings)).json())
    except c2pa.C2paError:
        return {}


def check_edit(file, root):
    """What is wrong with an edit of signed images."""
    manifests, expected = EDITS[file.stem]
    found = read(file.read_bytes(), file.suffix, root)
    active = found["manifests"][found["active_manifest"]]
    codes = [{s["code"] for s in i["validation_results"]["activeManifest"]["failure"]} for i in active["ingredients"]]
    if (found["validation_state"], len(found["manifests"]), codes) != ("Trusted", manifests, expected):
        yield f"{file.name}: {found['validation_state']}, {len(found['manifests'])} manifests, {codes}"
    second = encypher_c2pa.verify(str(file), trust_pem=root, telemetry=False, online=False)
    if second["validation_state"] != "Trusted" or len(second["manifest_report"]["manifests"]) != manifests:
        yield f"{file.name}, by encypher: {second['validation_state']}"


def verify(kiln, folder, files, root):
    """The states of files by `kiln verify`."""
    command = [kiln, "verify", "--json", "--trust", str(root), *map(str, files)]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.stderr or done.returncode not in (0, 1, 2):
        sys.exit(f"kiln verify ended with {done.returncode}:\n{done.stderr}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["file"] for report in found] == [str(file) for file in files]
    return [report["state"] for report in found]


def main():
    kiln, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    failed, better, states, draw = 0, 0, {}, random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("own", "other"):
            (folder / name).mkdir()
        command = ["cargo", "build", "--quiet", "--workspace", "--features", "kiln/verify", "--example", "carry"]
        subprocess.run(command, cwd=ROOT, check=True)
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        subprocess.run([target / "debug/examples/carry", folder], check=True)
        root = folder / "own/root.pem"
        files = sorted(file for file in folder.iterdir() if file.suffix in MEDIA)
        for file in files:
            for problem in check_edit(file, root.read_text()):
                failed += 1
                print(problem)
        if set(verify(kiln, folder, files, root)) != {"trusted"}:
            failed += 1
            print("kiln verify does not trust all of them")
        print(f"{len(files)} edits of signed images, {failed} not as they should be")
        while (done := sum(states.values())) < count:
            copies = []
            for number in range(min(BATCH, count - done)):
                file = draw.choice(files)
                kind, at, data = tampered(file.read_bytes(), draw)
                copy = folder / f"copy-{number}{file.suffix}"
                copy.write_bytes(data)
                copies.append((file.name, f"{kind} at {at}", copy))
            for (name, how, copy), state in zip(copies, verify(kiln, folder, [copy for *_, copy in copies], root)):
                states[state] = states.get(state, 0) + 1
                if state in ("valid", "trusted"):
                    second = read(copy.read_bytes(), copy.suffix, root.read_text()).get("validation_state")
                    if second not in ("Valid", "Trusted"):
                        better += 1
                        print(f"{name}, {how}: {state}, by c2pa-python {second}")
                if state in ("valid", "trusted") and not how.startswith("change"):
                    failed += 1
                    print(f"{name}, {how}: stays {state}")
        print(f"{count} changed copies: {states}; {better} better than by c2pa-python")
    sys.exit(failed > 0)


main()
