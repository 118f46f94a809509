"""Runs the functions `test_*` of the files `test_*.py` in this folder. They also run with pytest."""

import importlib
import pathlib
import sys
import time
import traceback

folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
chosen = sys.argv[1:]
failed = count = 0
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
        except Exception:
            failed += 1
            print(f"FAILED {file.name}: {name}")
            traceback.print_exc()
        if time.perf_counter() - began > 2:
            print(f"{name}: {time.perf_counter() - began:.1f} s")
    print(f"{file.name}: {time.perf_counter() - start:.1f} s", flush=True)
print(f"{count} tests, {failed} failed")
sys.exit(1 if failed else 0)
