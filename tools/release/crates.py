"""The crates inside a program: their licences as one text, and the bill of materials (CycloneDX).

    crates.py PACKAGE TRIPLE FOLDER [ARGUMENT OF CARGO…]    # writes both; the arguments choose features
"""

import json
import re
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

from project import ROOT, epoch, metadata, version

LICENCE_FILE = re.compile(r"(licen[sc]e|copying|copyright|notice|unlicense|patents)", re.IGNORECASE)
RULE = "-" * 100


def crates_of(target, root):
    """The packages that are linked into a root's program or library, by cargo's id, and the ids that each one depends on."""
    graph = metadata("--filter-platform", target.triple, *target.features, package=root)
    packages = {package["id"]: package for package in graph["packages"]}
    nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
    left = [next(id for id, package in packages.items() if package["name"] == root and not package["source"])]
    found = {}
    while left:
        id = left.pop()
        if id not in found:
            found[id] = sorted(d["pkg"] for d in nodes[id]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"]))
            left += found[id]
    return {id: packages[id] for id in sorted(found, key=lambda id: (packages[id]["name"], packages[id]["version"]))}, found


def licence_texts(package, others):
    """The texts in a crate's folder, those of code from elsewhere in its subfolders, too. Without any, those of a crate of the
    same repository and licence."""
    folder = Path(package["manifest_path"]).parent
    files = [file for file in folder.rglob("*") if file.is_file() and LICENCE_FILE.match(file.name) and file.suffix != ".rs"]
    files = [file for file in files if "tests" not in file.relative_to(folder).parts]
    siblings = [other for other in others if other["id"] != package["id"] and origin(other) == origin(package)]
    if not files and package["repository"] and siblings:
        return set.union(*(licence_texts(sibling, []) for sibling in siblings))
    if not files and "Apache-2.0" in (package["license"] or ""):
        files = [ROOT / "LICENSE-APACHE"]
    if not files and package["license"] == "MIT":
        terms = (ROOT / "LICENSE-MIT").read_text()
        return {f"Copyright (c) the authors of {package['name']}\n\n" + terms[terms.index("Permission is hereby granted") :].strip("\n")}
    if not files:
        raise SystemExit(f"error: {package['name']} {package['version']} ({package['license']}) has no text of its licence")
    return {file.read_text(errors="replace").replace("\r\n", "\n").strip("\n") for file in files}


def origin(package):
    return package["repository"], package["license"]


def third_party(target, root="kiln"):
    """All licences of a program's crates: a list of the crates, then every text once, with the crates that have it."""
    packages, _ = crates_of(target, root)
    others = [package for package in packages.values() if package["source"]]
    # Texts that differ in spaces and line breaks alone are one.
    texts, crates_with = {}, {}
    for package in others:
        for text in sorted(licence_texts(package, others)):
            words = " ".join(text.split())
            texts.setdefault(words, text)
            crates_with.setdefault(words, []).append(f"{package['name']} {package['version']}")
    lines = [f"Kiln {version()} for {target.triple} contains Rust's standard library (MIT OR Apache-2.0) and these crates:", ""]
    lines += [f"  {package['name']} {package['version']}: {package['license']}" for package in others]
    for words, crates in sorted(crates_with.items(), key=lambda pair: pair[1]):
        lines += ["", RULE, ", ".join(crates), RULE, "", texts[words]]
    return "\n".join(lines) + "\n"


def checksums():
    """The sha256 of each crate's file, from Cargo.lock."""
    blocks = (ROOT / "Cargo.lock").read_text().split("[[package]]")
    fields = [dict(re.findall(r'^(\w+) = "(.*)"$', block, re.MULTILINE)) for block in blocks]
    return {(block["name"], block["version"]): block["checksum"] for block in fields if "checksum" in block}


def component(package, hashes):
    name, number = package["name"], package["version"]
    described = {
        "type": "library",
        "bom-ref": reference(package),
        "name": name,
        "version": number,
        "description": " ".join((package["description"] or "").split()),
        "scope": "required",
        "licenses": [{"expression": " ".join((package["license"] or "").replace("/", " OR ").split())}],
        "purl": reference(package),
    }
    if (name, number) in hashes:
        described["hashes"] = [{"alg": "SHA-256", "content": hashes[name, number]}]
    if package["repository"]:
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def bill_of_materials(target, root="kiln"):
    packages, needs = crates_of(target, root)
    hashes = checksums()
    components = [component(package, hashes) for package in packages.values()]
    program = next(c for c in components if c["name"] == root)
    program["type"] = "application"
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"{program['purl']}/{target.triple}/{epoch()}").urn,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": program,
        },
        "components": [c for c in components if c is not program],
        "dependencies": [
            {"ref": reference(package), "dependsOn": sorted(reference(packages[n]) for n in needs[id])}
            for id, package in packages.items()
        ],
    }
    return json.dumps(bill, indent=1) + "\n"


if __name__ == "__main__":
    root, triple, folder, *features = sys.argv[1:]
    target = SimpleNamespace(triple=triple, features=features)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in [("THIRD-PARTY.txt", third_party), ("kiln.cdx.json", bill_of_materials)]:
        (Path(folder) / name).write_bytes(text(target, root).encode())
