"""LoRAs as diffusers' pipelines hold them: adapters with names, of which some are active."""

from __future__ import annotations

import os
from typing import Any, Optional


class Adapters:
    """The LoRAs of a pipeline. They are opened when an image is generated; loading one takes no time."""

    def __init__(self) -> None:
        # Name, path, and the weight of an active one.
        self._adapters: dict[str, tuple[str, Optional[float]]] = {}
        self._lora_enabled = True

    def load_lora_weights(
        self, pretrained_model_name_or_path_or_dict: Any, adapter_name: Optional[str] = None, **kwargs: Any
    ) -> None:
        """Adds a LoRA: a file of any common trainer, or a folder with `weight_name` or one LoRA in it.

        It becomes the only active one, as in diffusers; `set_adapters` combines several.
        """
        path = pretrained_model_name_or_path_or_dict
        weight_name = kwargs.pop("weight_name", None)
        if kwargs:
            raise NotImplementedError(f"load_lora_weights does not support {next(iter(kwargs))!r}")
        if not isinstance(path, (str, os.PathLike)):
            raise NotImplementedError("a LoRA must be a file or a folder; save the state dict with safetensors first")
        path = os.path.join(path, weight_name) if weight_name else os.fspath(path)
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no LoRA at {path!r}; download it from the hub first")
        name = adapter_name or f"default_{len(self._adapters)}"
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already; unload it or choose another adapter_name")
        self._adapters[name] = (os.path.abspath(path), None)
        self.set_adapters(name)

    def set_adapters(self, adapter_names: Any, adapter_weights: Any = None) -> None:
        """Makes these adapters the active ones, with a weight for each or one for all."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        weights = list(adapter_weights) if isinstance(adapter_weights, (list, tuple)) else [adapter_weights] * len(names)
        if len(weights) != len(names):
            raise ValueError(f"{len(weights)} weights were given for {len(names)} adapters")
        for name, weight in zip(names, weights):
            if name not in self._adapters:
                known = ", ".join(sorted(self._adapters)) or "none"
                raise ValueError(f"there is no adapter {name!r}; loaded are: {known}")
            if isinstance(weight, dict):
                raise NotImplementedError("weights of an adapter by block are not supported")
        active = {name: 1.0 if weight is None else float(weight) for name, weight in zip(names, weights)}
        self._adapters = {name: (path, active.get(name)) for name, (path, _) in self._adapters.items()}

    def delete_adapters(self, adapter_names: Any) -> None:
        """Removes adapters."""
        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            if name not in self._adapters:
                raise ValueError(f"there is no adapter {name!r}")
            del self._adapters[name]

    def unload_lora_weights(self, **_: Any) -> None:
        """Removes all adapters."""
        self._adapters = {}

    def disable_lora(self) -> None:
        """Generates without the adapters, which stay loaded."""
        self._lora_enabled = False

    def enable_lora(self) -> None:
        """Generates with the active adapters again."""
        self._lora_enabled = True

    def get_active_adapters(self) -> list[str]:
        """Returns the names of the active adapters."""
        return [name for name, (_, weight) in self._adapters.items() if weight is not None]

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Returns the adapters of each component; all are the transformer's."""
        return {"transformer": list(self._adapters)} if self._adapters else {}

    def fuse_lora(self, *_: Any, **__: Any) -> None:
        """Not supported: Kiln applies LoRAs to activations, which costs almost nothing."""
        raise NotImplementedError("Kiln does not fuse LoRAs: it applies them to activations, at almost no cost")

    def unfuse_lora(self, *_: Any, **__: Any) -> None:
        """Not supported, as `fuse_lora`."""
        raise NotImplementedError("Kiln does not fuse LoRAs")

    def _active_loras(self) -> list[tuple[str, float]]:
        if not self._lora_enabled:
            return []
        return [(path, weight) for path, weight in self._adapters.values() if weight is not None]
