"""The command line of the package, and its progress bars."""

import io
import subprocess
import sys

import kiln
from kiln import _progress_bar


def run(*args):
    return subprocess.run([sys.executable, "-m", "kiln", *args], capture_output=True, text=True, check=False)


def test_the_command_line_is_part_of_the_package():
    assert run("--version").stdout.strip() == f"kiln {kiln.__version__}"
    assert "ember" in run("models").stdout
    wrong = run("info", "nothing.png")
    assert wrong.returncode == 1 and "error: " in wrong.stderr and "Traceback" not in wrong.stderr
    assert run("update").returncode == 2
    assert "pip uninstall kiln" in run("uninstall").stdout


def test_a_terminal_without_tqdm_sees_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    before = sys.stderr, sys.modules.get("tqdm.auto")
    sys.stderr = terminal = Terminal()
    sys.modules["tqdm.auto"] = None
    try:
        with _progress_bar.progress_bar(None, 4, {}) as bar:
            bar.update(1)
            bar.update(3)
        assert list(_progress_bar.progress_bar("abc", None, {"disable": True})) == list("abc")
        _progress_bar.download_progress()("weights", 5, 10)
    finally:
        sys.stderr = before[0]
        del sys.modules["tqdm.auto"]
        if before[1] is not None:
            sys.modules["tqdm.auto"] = before[1]
    assert " 25% [#####" in terminal.getvalue() and "100% [####################] 4/4" in terminal.getvalue()
    assert terminal.getvalue().endswith(" 50% of 0.00 GB")
