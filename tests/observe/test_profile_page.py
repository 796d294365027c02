"""A traced step as a page."""

from axon.observe.page import profile_page


def test_a_page_has_every_table_with_its_title_and_what_looks_like_html_is_text():
    tables = [
        ("a step", ("part", "measured", "predicted"), [("<update>", "1.0", "2.0")]),
        ("kinds", ("kind",), [("a",)]),
    ]
    page = profile_page("a step of x.gin", tables)
    for text in ("a step of x.gin", "<h2>a step", "<h2>kinds", "<th>predicted", "&lt;update&gt;", "2.0"):
        assert text in page
    assert "<update>" not in page
