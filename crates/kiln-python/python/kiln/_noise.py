"""The noise of a generator: a seed that Kiln draws from, or what torch has drawn."""

from __future__ import annotations

import operator
from typing import Any

from ._inputs import torch_module


class Noise:
    """The `generator` of a pipeline: a seed, a `torch.Generator`, a list of either, or none.

    Kiln draws the noise of torch's generators itself, so that a seed needs no torch. A `torch.Generator` is advanced as
    diffusers would; one that has drawn before draws the noise itself.
    """

    def __init__(self, generator: Any, torch_dtype: Any) -> None:
        self.is_list = isinstance(generator, (list, tuple))
        self.generators = list(generator) if self.is_list else [] if generator is None else [generator]
        torch = torch_module()
        torch_generator = () if torch is None else torch.Generator
        self.is_torch = bool(self.generators) and isinstance(self.generators[0], torch_generator)
        self.torch_dtype = torch_dtype
        for one in self.generators:
            if isinstance(one, torch_generator) != self.is_torch:
                raise TypeError("generator must be seeds or torch generators, not both")
            if not self.is_torch and isinstance(one, bool):
                raise TypeError("generator must be a seed or a torch.Generator, found a bool")
            if not self.is_torch:
                try:
                    operator.index(one)
                except TypeError:
                    kind = type(one).__name__
                    raise TypeError(f"generator must be a seed or a torch.Generator, found {kind}") from None
        self.is_advanced = self.is_torch and any(_is_advanced(one) for one in self.generators)

    def check(self, images: int) -> None:
        """Refuses a list whose length is not the number of images."""
        if self.is_list and len(self.generators) != images:
            raise ValueError(
                f"You have passed a list of generators of length {len(self.generators)}, but requested an effective batch "
                f"size of {images}. Make sure the batch size matches the length of the generators."
            )

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a request."""
        if not self.generators:
            return {"one_generator": True}
        seeds = [one.initial_seed() if self.is_torch else operator.index(one) for one in self.generators]
        rng = "cpu"
        if self.is_torch:
            kinds = {one.device.type for one in self.generators}
            if kinds == {"cuda"}:
                rng = "cuda"
            elif kinds != {"cpu"}:
                raise NotImplementedError(f"generators of {', '.join(sorted(kinds))} are not supported")
            elif "16" in str(self.torch_dtype) and _version(torch_module()) <= (2, 11):
                # Later versions draw 16-bit noise as f32 and round it.
                rng = "cpu-bf16"
        return {"seed": seeds, "rng": rng, "one_generator": not self.is_list}

    def draw(self, shape: tuple[int, ...]) -> Any:
        """Draws the noise with torch."""
        torch = torch_module()
        dtype = torch.bfloat16 if "bf" in str(self.torch_dtype) else torch.float32
        shapes = [(1, *shape[1:])] * len(self.generators) if self.is_list else [shape]
        drawn = [
            torch.randn(one_shape, generator=one, device=one.device, dtype=dtype).cpu()
            for one, one_shape in zip(self.generators, shapes)
        ]
        return torch.cat(drawn)

    def advance(self, shape: tuple[int, ...]) -> None:
        """Leaves torch's generators as diffusers would: having drawn the noise."""
        if self.is_torch:
            self.draw(shape)


def _is_advanced(generator: Any) -> bool:
    torch = torch_module()
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return not torch.equal(fresh.get_state(), generator.get_state())


def _version(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
