"""Starts the tests of integrations/comfyui, which need torch. In a process of its own: the package looks for torch."""

import importlib.util
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(os.environ["KILN_DOCS"]).resolve().parent / "integrations" / "comfyui" / "tests"


def test_the_nodes_of_comfyui():
    if importlib.util.find_spec("torch") is None:
        print("skipped: the nodes of ComfyUI need torch")
        return
    run = subprocess.run([sys.executable, "-B", str(TESTS / "test_nodes.py")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
