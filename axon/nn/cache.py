"""Caches of blocks while a sequence's text is generated: pages, which grow with it, and states, which do not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jax import Array

from axon.axes import ArraySpec
from axon.errors import UserError

CacheKind = Literal["pages", "state"]

SCALE = "{}_scale"
"""Name of the scales of quantised pages, beside the pages of a name."""


@dataclass(frozen=True)
class CacheSpec(ArraySpec):
    """An array of a block's cache, before it exists.

    Args:
        axes, shape, dtype: see `ArraySpec`; of one layer.
        cache_kind: "pages": it grows with the text, by axes `pages` and `page_size`, and sequences with the same prefix
            share it; all layers of a kind of block share one array. "state": one value of a fixed size for each
            sequence, along `batch`: a recurrence's, a convolution's last tokens; zeros before the first token.
        constant: of a state, whether it is made before the first token and stays as it is, as the keys and values of
            what an encoder read: it has no snapshots, and is one also where drafts are verified.

    Raises `UserError` for axes that do not fit the kind, and for constant pages.
    """

    cache_kind: CacheKind = field(kw_only=True)
    constant: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        needed = {"pages": ("pages", "page_size"), "state": ("batch",)}
        if self.cache_kind not in needed:
            raise UserError(f"CacheSpec.cache_kind is {self.cache_kind!r}; must be 'pages' or 'state'")
        missing = [axis for axis in needed[self.cache_kind] if axis not in self.axes]
        first = next((axis for axis in self.axes if axis != "_layers"), None)
        if missing or (self.cache_kind == "state" and (first != "batch" or "pages" in self.axes)):
            raise UserError(
                f"CacheSpec of {' '.join(self.axes)}: pages have axes `pages` and `page_size`, and a state begins with "
                f"`batch` and has no pages; change the axes, or cache_kind, {self.cache_kind!r}"
            )
        if self.constant and self.cache_kind == "pages":
            raise UserError("CacheSpec.constant is of a state, and cache_kind is 'pages'; leave constant out")


def of_cache_kind(specs: Mapping[str, CacheSpec], kind: CacheKind) -> dict[str, CacheSpec]:
    """The caches that are pages, or those that are states."""
    return {name: spec for name, spec in specs.items() if spec.cache_kind == kind}


def page_names(specs: Mapping[str, CacheSpec]) -> frozenset[str]:
    """Names of the arrays that all layers of a kind share: pages, and their scales where they are quantised."""
    paged = of_cache_kind(specs, "pages")
    return frozenset((*paged, *map(SCALE.format, paged)))


def split_cache(
    cache: Mapping[str, Array] | None, pages: frozenset[str]
) -> tuple[dict[str, Array] | None, dict[str, Array]]:
    """A cache's states, None of no cache, and its pages, which have these names."""
    if cache is None:
        return None, {}
    states = {name: array for name, array in cache.items() if name not in pages}
    return states, {name: array for name, array in cache.items() if name in pages}
