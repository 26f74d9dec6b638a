"""A decoder's shape, read from a Hugging Face config.json.

What can't be modelled is refused by name, since a guess about a KV layout is a wrong answer about a card. The readers of the
single architectures are in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.capacity.layers import Layer
from pipeline.errors import UserInputError


@dataclass(frozen=True)
class Images:
    """What one image is to the decoder and to the vision tower."""

    tokens: int
    """Embeddings that it becomes."""
    values: int
    """Of its pixels, all channels."""


@dataclass(frozen=True)
class Geometry:
    """Widths of a decoder and its layers in order. All counts positive."""

    architecture: str
    model_type: str
    hidden: int
    vocabulary: int
    tied_embeddings: bool
    max_position: int
    layers: tuple[Layer, ...]
    computable_weights: bool = True
    """False: the config describes more than the decoder (a vision tower), so only a checkpoint can be counted."""
    images: Images | None = None
    """None: it takes none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Geometry:
        """Read the geometry from a parsed config.json. `where` names the source in error messages.

        Raises `UserInputError` for an architecture that isn't modelled and for a size that is missing or impossible.
        """
        from pipeline.capacity.families import read

        return read(Reader(config, where))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a geometry of a hundred layers is a key of the layout's cache at every point of a sweep."""
        return hash((self.architecture, self.hidden, self.vocabulary, self.layers))


class Reader:
    """Typed access to a config with the key, the value and what is allowed in every complaint."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        if not isinstance(config, Mapping):
            raise UserInputError(f"{where}: must be a mapping of keys, it is {type(config).__name__}")
        self._config, self.where = config, where

    @property
    def architecture(self) -> str:
        names = self._config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise UserInputError(f"{self.where}: architectures is {names!r}; it must name the model's class")
        return names[0]

    def inner(self, key: str) -> Reader:
        """The nested config under `key`, as multimodal models have their decoder's in text_config."""
        value = self._config.get(key)
        if not isinstance(value, Mapping):
            raise UserInputError(f"{self.where}: {key} is {value!r}; it must hold the decoder's keys")
        return Reader(value, f"{self.where}: {key}")

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        return self._config.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise UserInputError(f"{self.where}: {key} is {value!r}, it must be true or false")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; an absent or null key gives `default` where there is one."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UserInputError(f"{self.where}: {key} is {value!r}, it must be a positive integer")
        return value

    def kinds(self, key: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list with one of `allowed` per layer."""
        value = self._config.get(key)
        if not isinstance(value, list) or len(value) != count:
            found = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise UserInputError(
                f"{self.where}: {key} is {found}; it must list one kind for each of {count} layers"
            )
        for kind in value:
            if kind not in allowed:
                raise self.refuse(
                    key, f"holds {kind!r}, which isn't modelled; allowed are {', '.join(allowed)}"
                )
        return tuple(value)

    def refuse(self, key: str, why: str) -> UserInputError:
        return UserInputError(f"{self.where}: {key} {why}")
