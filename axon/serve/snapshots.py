"""Snapshots of states at borders of pages, by which sequences with the same prefix share what was computed of it."""

from collections import OrderedDict


class Snapshots:
    """Which prefixes the places 0 to `count` − 1 have the states of, by the hash of their last page.

    A place is taken for a new prefix from the one that was used the longest ago, unless a sequence still waits for its
    first step to be launched, which reads it.
    """

    def __init__(self, count: int):
        self._free = list(range(count))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        """Of each known prefix; the least recently used first."""
        self._held: dict[int, int] = {}
        """Place → how many sequences are still to begin with it."""

    def known(self, digest: bytes) -> bool:
        """Whether there is a snapshot of a prefix."""
        return digest in self._places

    def hold(self, digest: bytes) -> int:
        """The place of a known prefix, which stays as it is until it is released."""
        place = self._places[digest]
        self._places.move_to_end(digest)
        self._held[place] = self._held.get(place, 0) + 1
        return place

    def release(self, place: int) -> None:
        """One of those who hold it reads it no more: steps that are launched later may write to it."""
        self._held[place] -= 1
        if not self._held[place]:
            del self._held[place]
            if place not in self._places.values():  # it was forgotten meanwhile
                self._free.append(place)

    def save(self, digest: bytes) -> int | None:
        """A place for the states of a prefix, known from now on; None if there is one already, or all are held."""
        if digest in self._places:
            self._places.move_to_end(digest)
            return None
        if not self._free and not self._evict():
            return None
        self._places[digest] = self._free.pop()
        return self._places[digest]

    def forget_all(self) -> None:
        """No prefix is known any more."""
        self._free += [place for place in self._places.values() if place not in self._held]
        self._places.clear()

    def _evict(self) -> bool:
        digest = next((digest for digest, place in self._places.items() if place not in self._held), None)
        if digest is not None:
            self._free.append(self._places.pop(digest))
        return digest is not None
