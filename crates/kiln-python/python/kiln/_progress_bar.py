"""Progress bars: tqdm's where it is installed, else a plain one on a terminal, else none."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 20


class NoBar:
    """Shows nothing in place of a progress bar."""

    def __init__(self, iterable: Any = None) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class TextBar(NoBar):
    """A line on standard error that is drawn again and again."""

    def __init__(self, iterable: Any = None, total: Optional[int] = None, desc: Optional[str] = None) -> None:
        super().__init__(iterable)
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total or 0
        self.done = 0
        self._what = f"{desc}: " if desc else ""
        self._start = time.monotonic()
        self._draw()

    def update(self, n: int = 1) -> None:
        """Adds `n` to what is done."""
        self.done += n
        self._draw()

    def close(self) -> None:
        """Ends the line."""
        print(file=sys.stderr)

    def _draw(self) -> None:
        share = min(self.done / self.total, 1) if self.total else 0
        filled = "#" * round(share * WIDTH)
        seconds = time.monotonic() - self._start
        line = f"{self._what}{share:4.0%} [{filled:{WIDTH}}] {self.done}/{self.total} {seconds:.0f} s"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether a person sees standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


def progress_bar(iterable: Any, total: Optional[int], config: dict[str, Any]) -> Any:
    """Returns a progress bar with the arguments of tqdm."""
    if config.get("disable"):
        return NoBar(iterable)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return TextBar(iterable, total, config.get("desc")) if on_terminal() else NoBar(iterable)
    return tqdm(iterable, total=total, **config)


def download_progress() -> Optional[Callable[[str, int, int], Any]]:
    """Returns a function that shows a download on a terminal."""
    if not on_terminal():
        return None

    def show(_: str, done: int, total: int) -> None:
        share = done / total if total else 1
        end = "\n" if done == total else ""
        print(f"\r{share:4.0%} of {total / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)

    return show
