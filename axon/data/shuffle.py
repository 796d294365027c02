"""A permutation of indices that needs no memory: grain's interface to it is experimental (grain 0.2)."""

from grain.experimental import index_shuffle

__all__ = ["index_shuffle"]
