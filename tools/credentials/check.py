#!/usr/bin/env python3
"""Checks signed images with two validators that share no code with Kiln.   check.py [--kiln PROGRAM] [--tampered COUNT]

Needs `pip install c2pa-python encypher-c2pa pillow` and cargo. Signs images in every format, with every kind of key, with time
stamps and with certificates that have expired since (`kiln-credentials/examples/sign.rs`). c2pa-python must call each `Valid`
with the root unknown and `Trusted` with it, encypher-c2pa the same; COUNT (default 1000) copies with one changed, cut or added
piece must be valid never, and crash nothing. Names and lengths of boxes inside the store are not signed: a byte that changes
there may go unnoticed.

With PROGRAM, images come from `kiln generate` and `kiln upscale`, too: words, references, initial images, masks, edits of signed
files. Their marks are read by Pillow, and by exiftool if it is installed, and their pixels compared with those of unmarked files.
"""

import argparse
import io
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import c2pa
import encypher_c2pa
import PIL.Image
from tampering import tampered

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEDIA = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}
SOURCES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
UNKNOWN = ["signingCredential.untrusted"]
SIDE = "64"
MODEL = "ember"
# What `kiln generate` adds for each kind of image.
KINDS = {
    "words": [],
    "reference": ["-r", "plain.png"],
    "references": ["-r", "plain.png", "-r", "signed.png"],
    "initial": ["-i", "plain.png"],
    "mask": ["-i", "plain.png", "--mask", "white.png"],
    "edit-of-signed": ["-i", "signed.png"],
}


def read(data, suffix, roots=None):
    """State, problems and time of a file's credentials."""
    settings = {"verify": {"verify_trust": True}}
    if roots:
        settings["trust"] = {"user_anchors": roots}
    context = c2pa.Context(c2pa.Settings.from_dict(settings))
    try:
        found = json.loads(c2pa.Reader(MEDIA[suffix], io.BytesIO(data), context=context).json())
    except c2pa.C2paError as error:
        return "unreadable", [str(error)], None
    problems = [status["code"] for status in found.get("validation_status", [])]
    signature = found["manifests"][found["active_manifest"]].get("signature_info", {})
    return found.get("validation_state"), problems, signature.get("time")


def second_state(file, roots=None):
    """The state by a validator that shares no code with the first."""
    report = encypher_c2pa.verify(str(file), trust_pem=roots, tsa_trust_pem=roots, telemetry=False, online=False)
    return report["validation_state"]


def check(file, roots, stamped=False, expired=False):
    """What is wrong with a file's credentials."""
    data = file.read_bytes()
    unknown, known = read(data, file.suffix), read(data, file.suffix, roots)
    # Of an authority that nobody knows, the time does not count.
    codes = UNKNOWN + ["timeStamp.untrusted"] * stamped
    problems = []
    if expired and not stamped:
        if known[0] != "Invalid" or "signingCredential.expired" not in known[1]:
            problems.append(f"expired, but {known}")
        return problems
    if not expired and (unknown[0] != "Valid" or not set(UNKNOWN) <= set(unknown[1]) <= set(codes)):
        problems.append(f"by c2pa {unknown}")
    if known[:2] != ("Trusted", []) or (known[2] is not None) != stamped:
        problems.append(f"by c2pa with the root {known}")
    second = None if expired else second_state(file), second_state(file, roots)
    if second[0] not in ("Valid", None) or second[1] != "Trusted":
        problems.append(f"by encypher {second}")
    return problems


def in_store(data, at):
    """Whether a byte is in the manifest store with its frame, of a file that has it in one piece."""
    start = data.find(b"jumb") - 4
    length = int.from_bytes(data[start : start + 4], "big")
    return start - 12 <= at < start + length


def check_tampered(files, count):
    """How many tampered copies of files stay valid."""
    states, draw, failed = {}, random.Random(1), 0
    for _ in range(count):
        file = draw.choice(files)
        whole = file.read_bytes()
        kind, at, data = tampered(whole, draw)
        state, problems, _ = read(data, file.suffix)
        states[state] = states.get(state, 0) + 1
        if state in ("Valid", "Trusted") and not (kind == "change" and in_store(whole, at)):
            failed += 1
            print(f"{file.name}: {kind} at {at} of {len(data)} stays {state}: {problems}")
    print(f"tampered copies: {states}")
    return failed


def check_example(folder):
    """Checks the files of the example; returns those of the main key, and the number of failures."""
    command = ["cargo", "run", "--quiet", "-p", "kiln-credentials", "--example", "sign", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    roots = "".join((folder / name).read_text() for name in ["root.pem", "other.pem", "tsa.pem"])
    files, failed = sorted(file for file in folder.iterdir() if file.suffix in MEDIA), 0
    for file in files:
        for problem in check(file, roots, "stamped" in file.name, "expired" in file.name):
            failed += 1
            print(f"{file.name}: {problem}")
    stamped = [file for file in files if "stamped" in file.name]
    times = {read(file.read_bytes(), file.suffix, roots)[2] for file in stamped}
    print(f"{len(files)} files of the example, {failed} not as they should be; time stamps {sorted(times)}")
    return [file for file in files if "expired" not in file.name and "stamped" not in file.name], failed


def marks(file):
    """The mark of a file, by Pillow's XMP."""
    image = PIL.Image.open(file)
    packet = image.info.get("XML:com.adobe.xmp") or image.info.get("xmp") or b""
    packet = packet.decode() if isinstance(packet, bytes) else packet
    found = {}
    for element in xml.etree.ElementTree.fromstring(packet[packet.index("<x:xmpmeta") :].split("<?xpacket")[0]).iter():
        for name, value in [(element.tag, (element.text or "").strip()), *element.attrib.items()]:
            if value:
                found[name.rpartition("}")[2]] = value
    return found


def check_marks(file, kind, version):
    """What is wrong with the mark of a file."""
    composite = kind not in ("words", "reference", "references")
    source = SOURCES + ("compositeWithTrainedAlgorithmicMedia" if composite else "trainedAlgorithmicMedia")
    expected = {
        "DigitalSourceType": source,
        "AISystemUsed": f"Kiln, {MODEL}",
        "AISystemVersionUsed": version,
        "CreatorTool": f"Kiln {version}",
    }
    found = marks(file)
    wrong = [f"{name} {found.get(name)}" for name, value in expected.items() if found.get(name) != value]
    if shutil.which("exiftool"):
        command = ["exiftool", "-j", "-n", "-XMP:all", str(file)]
        [read] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        # Older versions do not know the properties of IPTC 2025.1, and print them all the same.
        wrong += [f"by exiftool {name} {read.get(name)}" for name, value in expected.items() if read.get(name) != value]
    return wrong


def check_program(program, folder):
    """Checks the files of the program; returns the number of failures."""
    run = lambda *arguments: subprocess.run(
        [program, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    home = folder / "credentials"
    run("credentials", "new", "--name", "Ada", "--folder", str(home))
    roots = (home / "root.pem").read_text()
    sign = ["--sign-key", str(home / "key.pem"), "--sign-cert", str(home / "certificate.pem")]
    generate = ["generate", "-m", "ember", "a red apple", "-S", "1", "-s", "2", "-W", SIDE, "-H", SIDE]
    run(*generate, "-o", "plain.png", "--no-recipe", "--no-ai-mark")
    run(*generate, *sign, "-o", "signed.png")
    mask = PIL.Image.new("L", (int(SIDE), int(SIDE)))
    mask.paste(255, (16, 16, 48, 48))
    mask.save(folder / "white.png")
    version = run("--version").split()[1]
    failed = count = 0
    for kind in [*KINDS, "upscale"]:
        for suffix in MEDIA:
            name = f"{kind}{suffix}"
            command = [*generate, *KINDS.get(kind, [])]
            if kind == "upscale":
                command = ["upscale", "-m", "ember", "signed.png", "-S", "1", "-s", "1"]
            run(*command, *sign, "-o", name)
            run(*command, "--no-recipe", "--no-ai-mark", "-o", f"bare-{name}")
            file, bare = folder / name, folder / f"bare-{name}"
            problems = check(file, roots) + check_marks(file, kind, version)
            if PIL.Image.open(file).tobytes() != PIL.Image.open(bare).tobytes():
                problems.append("other pixels than the unmarked file")
            count += 1
            failed += len(problems)
            for problem in problems:
                print(f"{name}: {problem}")
    print(f"{count} files of the program, {failed} not as they should be")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kiln", help="a program that has Ember")
    parser.add_argument("--tampered", type=int, default=1000, help="number of tampered copies")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        files, failed = check_example(folder)
        failed += check_tampered(files, options.tampered)
    if options.kiln:
        with tempfile.TemporaryDirectory() as folder:
            failed += check_program(str(pathlib.Path(options.kiln).resolve()), pathlib.Path(folder))
    sys.exit(failed > 0)


main()
