"""Runs the functions `test_*` of the files `test_*.py` in this folder. They also run with pytest.

    python run.py [PART OF A NAME…]

`cargo test` gives them the tiny models. Without cargo they are put together here, for the package that is installed.
"""

import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
import unittest

folder = pathlib.Path(__file__).resolve().parent
root = folder.parent.parent.parent


def assemble(models):
    """Puts the models of `testdata` together as kiln-golden does, but for those whose weights it draws at random."""
    tiny = root / "testdata/tiny"
    for name in ["klein", "klein-base", "klein-kv", "klein-small-decoder", "dev"]:
        model = models / name
        shutil.copytree(tiny / name, model)
        for component in ["transformer", "vae", "scheduler"] + ["text_encoder"] * (name != "dev"):
            if not (model / component).exists():
                shutil.copytree(tiny / "klein" / component, model / component)
        if name != "dev":
            shutil.copytree(root / "testdata/tokenizer", model / "tokenizer")
        os.environ["KILN_TEST_" + name.upper().replace("-", "_")] = str(model)
    os.environ.update(KILN_TESTDATA=str(root / "testdata"), KILN_DOCS=str(root / "docs"))
    os.environ.setdefault("KILN_CACHE_DIR", str(models / "cache"))
    os.environ.pop("KILN_MODEL", None)
    work = models / "work"
    work.mkdir()
    os.chdir(work)


def main(chosen):
    sys.path.insert(0, str(folder))
    failed = skipped = count = 0
    for file in sorted(folder.glob("test_*.py")):
        start = time.perf_counter()
        module = importlib.import_module(file.stem)
        for name, test in sorted(vars(module).items()):
            if not name.startswith("test_") or not callable(test) or chosen and not any(text in name for text in chosen):
                continue
            count += 1
            began = time.perf_counter()
            try:
                test()
            except unittest.SkipTest as reason:
                skipped += 1
                print(f"{name}: skipped, {reason}")
            except Exception:
                failed += 1
                print(f"FAILED {file.name}: {name}")
                traceback.print_exc()
            if time.perf_counter() - began > 2:
                print(f"{name}: {time.perf_counter() - began:.1f} s")
        print(f"{file.name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{count} tests, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if "KILN_TESTDATA" in os.environ:
    sys.exit(main(sys.argv[1:]))
temporary = tempfile.mkdtemp()
try:
    assemble(pathlib.Path(temporary))
    sys.exit(main(sys.argv[1:]))
finally:
    os.chdir(root)
    shutil.rmtree(temporary, ignore_errors=True)
