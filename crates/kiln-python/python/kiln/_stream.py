"""What happens in a request, one event after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from ._image import Image, Note, Preview, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from . import _kiln

    Event = Union[Image, Note, Preview, Progress]


class Stream:
    """What happens in a request: an iterator over `Progress`, `Note`, `Preview` and `Image`."""

    def __init__(self, job: _kiln.Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        message = self._job.next()
        if message is None:
            raise StopIteration
        return event_of(*message)

    def cancel(self) -> None:
        """Cancels the request; the iteration then raises `Cancelled`."""
        self._job.cancel()

    def close(self) -> None:
        """Cancels the request and waits for its end."""
        self._job.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def event_of(kind: str, fields: dict[str, Any]) -> Event:
    if kind == "image":
        return Image(fields["image"])
    if kind == "preview":
        return Preview(fields["pixels"])
    if kind == "note":
        return Note(fields["text"])
    return Progress(**fields)
