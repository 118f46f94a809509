#!/usr/bin/env python3
"""Kiln in a console of Windows, which Wine shows on a terminal: console.py KILN_EXE [WINE]

Escape sequences, letters beyond ASCII, Ctrl-C, and what a double click does.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request

KILN, WINE = os.path.abspath(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "wine"


class Console:
    """The program on a terminal of its own."""

    def __init__(self, *arguments, **variables):
        self.folder = tempfile.mkdtemp()
        self.master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "LOCALAPPDATA": self.folder, **variables}
        self.process = subprocess.Popen(
            [WINE, KILN, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, cwd=self.folder, env=environment,
            start_new_session=True,
        )
        os.close(terminal)
        self.shown = b""

    def read(self, seconds):
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.shown += os.read(self.master, 65536)
            except OSError:
                return False
        return True

    def text(self):
        """What was printed, without escape sequences. Wine moves the cursor instead of printing spaces."""
        shown = re.sub(rb"\x1b\[(\d*)C", lambda found: b" " * int(found.group(1) or 1), self.shown)
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07", b"", shown).decode("utf8", "replace")

    def until(self, pattern, seconds=90):
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text())):
            assert time.monotonic() < end and self.process.poll() is None, f"no `{pattern}` in:\n{self.text()[-2000:]}"
            self.read(0.1)
        return found

    def press(self, key):
        os.write(self.master, key)

    def press_ctrl_c(self):
        """Wine makes the console's event of the signal."""
        self.process.send_signal(signal.SIGINT)

    def end(self, seconds=60):
        """The exit code."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < limit, f"still running:\n{self.text()[-2000:]}"
            self.read(0.1)
        while self.read(0.1) and select.select([self.master], [], [], 0.2)[0]:
            pass
        return self.process.returncode

    def kill(self):
        self.process.kill()
        self.process.wait()


def ctrl_c_ends_a_generation():
    console = Console("generate", "fox", "-s", "900", "-o", "a.png")
    console.until(r"\d+/900")
    console.press_ctrl_c()
    assert console.end() == 130, console.text()
    assert "cancelled" in console.text() and os.listdir(console.folder) == [], os.listdir(console.folder)


def ctrl_c_ends_a_server():
    console = Console("serve", "--port", "0", "--data", "data")
    console.until(r"at http://127\.0\.0\.1:\d+")
    console.press_ctrl_c()
    assert console.end() == 0, console.text()


def letters_and_colours_reach_the_console():
    console = Console("generate", "雪の中の狐 ñ", "-s", "1", "-o", "狐.png")
    assert console.end() == 0, console.text()
    assert "狐.png" in console.text(), console.text()
    assert os.listdir(console.folder) == ["狐.png"], os.listdir(console.folder)
    console = Console("--help")
    console.end()
    assert re.search(rb"\x1b\[[0-9;]*m", console.shown), "the help has no colours"
    assert b"\xe2\x86\x90[" not in console.shown, "escape sequences are printed"


def a_double_click_opens_the_page():
    folder = tempfile.mkdtemp()
    browser = os.path.join(folder, "browser.bat")
    with open(browser, "w") as file:
        file.write("@echo %1 > opened.txt\r\n")
    console = Console(BROWSER="Z:" + browser.replace("/", "\\"))
    try:
        url = console.until(r"at (http://127\.0\.0\.1:\d+)").group(1)
        opened = os.path.join(console.folder, "opened.txt")
        end = time.monotonic() + 60
        while not os.path.exists(opened) or not open(opened).read().strip():
            assert time.monotonic() < end, "no browser was started"
            console.read(0.1)
        assert open(opened).read().strip() == url + "/", open(opened).read()
        assert b"<html" in urllib.request.urlopen(url).read().lower()
        # A second one finds the first, opens its page and ends.
        second = Console(BROWSER="Z:" + browser.replace("/", "\\"))
        assert second.end() == 0, second.text()
        assert f"kiln runs already, at {url}: opening its page" in second.text(), second.text()
        opened = os.path.join(second.folder, "opened.txt")
        end = time.monotonic() + 60
        while not os.path.exists(opened) or not open(opened).read().strip():
            assert time.monotonic() < end, "no browser was started"
            time.sleep(0.1)
        assert open(opened).read().strip() == url + "/", open(opened).read()
    finally:
        console.press_ctrl_c()
        console.end()


def main():
    failed = 0
    tests = [ctrl_c_ends_a_generation, ctrl_c_ends_a_server, letters_and_colours_reach_the_console, a_double_click_opens_the_page]
    for test in tests:
        try:
            test()
        except Exception as error:
            failed += 1
            print(f"{test.__name__}: {error!r}"[:3000])
    print(f"test result: {'FAILED' if failed else 'ok'}. {len(tests) - failed} passed; {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
