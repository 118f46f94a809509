"""The examples of docs/python.md as they stand, in order, and the package's types."""

import os
import pathlib
import re
import subprocess
import sys


def test_examples_of_the_page_run():
    page = (pathlib.Path(os.environ["KILN_DOCS"]) / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) > 5
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "python.md", "exec"), namespace)


def test_types_are_right():
    found = subprocess.run([sys.executable, "-c", "import mypy"], capture_output=True)
    if found.returncode:
        print("types are not checked: mypy is not installed")
        return
    import kiln

    folder = pathlib.Path(kiln.__file__).parent
    pathlib.Path("mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-numpy.*,PIL.*,torch.*,tqdm.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "mypy_cache"]
    checked = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
