"""The images of a request after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ._inputs import array_bytes, numpy_module, stack

if TYPE_CHECKING:
    from . import _kiln


class Step:
    """The images of a request after a step.

    Assign `latents` to continue with others, or call `stop` to skip the remaining steps and decode the images as they are.
    """

    def __init__(self, step: int, steps: int, sigma: float, image: int, latents: list[_kiln.Array]) -> None:
        self.step = step
        """Index of the step, from 0."""
        self.steps = steps
        """Number of steps."""
        self.sigma = sigma
        """Noise level before the step."""
        self.image = image
        """Index of the first image."""
        self.latents = stack(latents)
        """Latents after the step, `[images, tokens, channels]`."""
        self._original = self.latents
        self._before = self.latents.copy()
        self._stop = False

    def stop(self) -> None:
        """Skips the remaining steps."""
        self._stop = True

    def _changed(self) -> Optional[list[Any]]:
        if self.latents is self._original and numpy_module().array_equal(self.latents, self._before):
            return None
        return [array_bytes(latents, "latents") for latents in self.latents]
