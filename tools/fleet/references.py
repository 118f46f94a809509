#!/usr/bin/env python3
"""Checks that a kustomize folder holds the secrets, volumes and files that it refers to. Needs PyYAML.

Usage: references.py FOLDER
"""
import os
import sys

import yaml

folder = sys.argv[1]


def read(name):
    with open(os.path.join(folder, name)) as file:
        return [part for part in yaml.safe_load_all(file) if part]


def values(part, key):
    """Everything under a key, however deep."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(part, list):
        for value in part:
            yield from values(value, key)


[kustomization] = read("kustomization.yaml")
resources = [part for name in kustomization["resources"] for part in read(name)]
secrets = {}
for secret in kustomization.get("secretGenerator", []):
    keys = secrets.setdefault(secret["name"], set())
    for name in secret["envs"]:
        with open(os.path.join(folder, name + ".example")) as file:
            keys |= {line.split("=")[0] for line in file if "=" in line and not line.startswith("#")}
claims = {part["metadata"]["name"] for part in resources if part["kind"] == "PersistentVolumeClaim"}
wrong = []
for reference in values(resources, "secretKeyRef"):
    if reference["key"] not in secrets.get(reference["name"], ()):
        wrong.append(f"no secret {reference['name']} with {reference['key']}")
for reference in values(resources, "persistentVolumeClaim"):
    if reference["claimName"] not in claims:
        wrong.append(f"no claim {reference['claimName']}")
[queue] = [part for part in resources if part["kind"] == "StatefulSet" and part["metadata"]["name"] == "queue"]
if "--pass" not in queue["spec"]["template"]["spec"]["containers"][0]["args"]:
    wrong.append("the queue has no password")
sys.exit("\n".join(wrong) or None)
