"""Examples as they are trained on as one HTML page: what is learned of each is marked."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from axon.observe.page_style import html_page


class ShownExample(NamedTuple):
    """An example: where it is from, and its texts, each in pieces with how much their tokens count, 0 of what is not
    learned."""

    title: str
    texts: Sequence[Sequence[tuple[str, float]]]


def examples_page(name: str, lines: Sequence[str], examples: Sequence[ShownExample]) -> str:
    """The page, as HTML. `lines`: what is said of all examples together."""
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    key = '<p><mark class="learned">learned</mark> by the model; the rest is read</p>'
    head = f"<header><h1>{escape(name)}</h1>{said}{key}</header>"
    return html_page(name, head + "".join(map(_example, examples)))


def _example(one: ShownExample) -> str:
    texts = "".join(f'<pre class="example">{"".join(_piece(*piece) for piece in text)}</pre>' for text in one.texts)
    return f"<section><h2>{escape(one.title)}</h2>{texts}</section>"


def _piece(text: str, weight: float) -> str:
    if not weight:
        return escape(text)
    by = "" if weight == 1 else f"<small>×{weight:g}</small>"
    return f'<mark class="learned">{escape(text)}</mark>{by}'
