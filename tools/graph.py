#!/usr/bin/env python3
"""The import graph of the files inside a crate: circles, and arrows that run up.

    tools/graph.py kiln-server kiln      # figures
    tools/graph.py -v kiln-server        # with the files and arrows behind them
    tools/graph.py --check               # all crates; fails if one has a circle

An arrow runs from a file to the file that defines what it names: in `use`, or as a full path in code. A name that a module
re-exports counts for the file behind it. Left out: tests, and the crate root, which lists everything.
"""

import re
import sys
from pathlib import Path

CRATES = Path(__file__).resolve().parent.parent / "crates"


def read_layers():
    """The layers of each crate, lowest first: lists of modules at its root."""
    lines = (Path(__file__).parent / "layers.txt").read_text().splitlines()
    crates = (line.split(": ") for line in lines if not line.startswith("#"))
    return {name: [layer.split(" ") for layer in layers.split(" | ")] for name, layers in crates}


LAYERS = read_layers()


def without_tests(text):
    """The text without comments, strings' contents, test modules and what only documentation links to."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    while match := re.search(r"#\[cfg\((?:all\()?(?:test|doc)\b[^\]]*\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([a-z]+\))? )?(?:mod|impl|fn|use)[^{;]*", text):
        end = match.end()
        if end < len(text) and text[end] == "{":
            depth = 0
            while end < len(text):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
                if depth == 0:
                    break
        text = text[: match.start()] + text[end + 1 :]
    return text


def use_paths(tree, prefix=()):
    """Every path of a use tree, with the name it is used by: `a::{b, c as d}`."""
    tree = tree.strip()
    if tree.startswith("{"):
        depth, inner = 0, tree[1 : tree.rindex("}")]
        parts, start = [], 0
        for i, c in enumerate(inner):
            depth += {"{": 1, "}": -1}.get(c, 0)
            if c == "," and depth == 0:
                parts.append(inner[start:i])
                start = i + 1
        parts.append(inner[start:])
        for part in parts:
            if part.strip():
                yield from use_paths(part, prefix)
        return
    head, found, rest = tree.partition("::")
    if found:
        yield from use_paths(rest, (*prefix, head.strip()))
        return
    name, _, alias = head.partition(" as ")
    name, alias = name.strip(), (alias or name).strip()
    if name == "self":
        yield prefix, prefix[-1] if prefix else "self"
    else:
        yield (*prefix, name), alias


class Crate:
    def __init__(self, name):
        self.name, self.source = name, CRATES / name / "src"
        self.files = {}  # module path -> text
        for file in sorted(self.source.rglob("*.rs")):
            parts = list(file.relative_to(self.source).with_suffix("").parts)
            if parts[-1] == "mod":
                parts.pop()
            if parts in (["lib"], ["main"]):
                parts = []
            self.files.setdefault(tuple(parts), without_tests(file.read_text()))
        # Modules that exist only in tests.
        raw = "".join(f.read_text() for f in self.source.rglob("*.rs"))
        for test in re.findall(r"#\[cfg\(test\)\]\s*mod (\w+);", raw):
            self.files = {m: t for m, t in self.files.items() if not m or m[-1] != test}
        self.uses = {m: self.parse_uses(m, text) for m, text in self.files.items()}
        self.reexports = {
            m: {alias: path for path, alias, public in uses if public} for m, uses in self.uses.items()
        }

    def absolute(self, module, path):
        """A path as seen from the crate's root; None if it leads elsewhere."""
        path = list(path)
        if path[0] == "crate":
            return tuple(path[1:])
        here = list(module)
        if path[0] in ("self", "super"):
            while path and path[0] in ("self", "super"):
                if path.pop(0) == "super":
                    here = here[:-1]
            return tuple(here + path)
        if (*module, path[0]) in self.files:
            return (*module, *path)
        return None

    def parse_uses(self, module, text):
        uses = []
        for public, tree in re.findall(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);", text):
            for path, alias in use_paths(re.sub(r"\s+", " ", tree)):
                path = self.absolute(module, path) if path else None
                if path is not None:
                    uses.append((path, alias, bool(public)))
        return uses

    def file_of(self, path, depth=0):
        """The module whose file defines what a path names."""
        module = ()
        rest = list(path)
        while rest and (*module, rest[0]) in self.files:
            module = (*module, rest.pop(0))
        if rest and depth < 8:
            target = self.reexports[module].get(rest[0])
            if target is not None and target != path:
                return self.file_of((*target, *rest[1:]), depth + 1)
        return module

    def arrows(self):
        found = {}
        for module, text in self.files.items():
            if not module:
                continue
            body = re.sub(r"\b(?:use\s+[^;]+|mod\s+\w+);", "", text)
            # A re-export is an arrow if the file itself uses the name.
            named = [
                path
                for path, alias, public in self.uses[module]
                if not public or re.search(rf"\b{re.escape(alias)}\b", body)
            ]
            for path in re.findall(r"(?<![\w:])\w+(?:::\w+)+", body):
                if (path := self.absolute(module, path.split("::"))) is not None:
                    named.append(path)
            targets = {self.file_of(path) for path in named} - {module, ()}
            found[module] = targets
        return found


def circles(arrows):
    """Strongly connected components with more than one file."""
    order, low, stack, on, result = {}, {}, [], set(), []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        on.add(node)
        for other in arrows.get(node, ()):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            component = []
            while True:
                component.append(stack.pop())
                on.discard(component[-1])
                if component[-1] == node:
                    break
            if len(component) > 1:
                result.append(sorted(component))

    sys.setrecursionlimit(10000)
    for node in sorted(arrows):
        if node not in order:
            visit(node)
    return sorted(result, key=len, reverse=True)


def layer_of(crate, module):
    return next((rank for rank, layer in enumerate(LAYERS.get(crate, [])) if module[0] in layer), None)


def check():
    """Says which files of which crates are in a circle; returns whether there is none."""
    found = False
    for folder in sorted(CRATES.iterdir()):
        for circle in circles(Crate(folder.name).arrows()):
            print(f"{folder.name}: a circle of imports: {' '.join('/'.join(m) for m in circle)}")
            found = True
    return not found


def main():
    arguments = sys.argv[1:]
    if arguments == ["--check"]:
        sys.exit(0 if check() else 1)
    verbose = "-v" in arguments
    for name in [a for a in arguments if a != "-v"] or ["kiln-server", "kiln"]:
        crate = Crate(name)
        arrows = crate.arrows()
        found = circles(arrows)
        up = []
        for source, targets in sorted(arrows.items()):
            own = layer_of(name, source)
            if own is None and name in LAYERS:
                print(f"{name}: {'/'.join(source)} has no layer")
            for target in sorted(targets):
                other = layer_of(name, target)
                if None not in (own, other) and other > own:
                    up.append((source, target))
        features, fleet, gateway = [], 0, 0
        for file in sorted(crate.source.rglob("*.rs")):
            text = re.sub(r"//[^\n]*", "", file.read_text())
            gateway += len(re.findall(r"\.is_gateway\(\)", text))
            if file.relative_to(crate.source).as_posix() not in ("lib.rs", "main.rs"):
                count = len(re.findall(r"cfg(?:_attr)?\([^\n]*feature = ", text))
                fleet += len(re.findall(r'cfg(?:_attr)?\([^\n]*feature = "fleet"', text))
                features += [file.relative_to(crate.source).as_posix()] * count
        print(f"{name}: {len(crate.files)} files, {sum(map(len, arrows.values()))} arrows")
        sizes = ", ".join(str(len(c)) for c in found) or "none"
        print(f"  circles: {sizes}")
        if verbose:
            for circle in found:
                print("    " + " ".join("/".join(m) for m in circle))
        if name in LAYERS:
            print(f"  arrows up: {len(up)}")
            if verbose:
                for source, target in up:
                    print(f"    {'/'.join(source)} -> {'/'.join(target)}")
        print(f"  cfg(feature) outside the crate root: {len(features)}, of fleet: {fleet}")
        if verbose:
            for file in sorted(set(features)):
                print(f"    {file} {features.count(file)}")
        print(f"  is_gateway calls: {gateway}")


if __name__ == "__main__":
    main()
