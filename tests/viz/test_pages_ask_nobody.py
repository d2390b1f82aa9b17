"""A saved page asks no network and runs its own scripts alone; a text of the data is text, whatever it looks like."""

import re

from hfsdk.viz.frame import html_page
from hfsdk.viz.svg import svg_document, svg_text, tag

EVIL = '</text><script>alert("x")</script> & "quoted"'


def test_a_page_allows_nothing_but_its_own_scripts_and_styles():
    page = html_page("a title", "<p>hello</p><script>const a = 1</script>")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"blob: 'sha256-[A-Za-z0-9+/=]+'", rules["script-src"])
    assert (rules["style-src"], rules["img-src"]) == ("'unsafe-inline'", "data:")
    assert (rules["base-uri"], rules["form-action"]) == ("'none'", "'none'")


def test_a_text_is_no_element():
    for drawn in (svg_text(1, 2, EVIL), tag("rect", data_text=EVIL), svg_document(10, 10, EVIL, EVIL, "")):
        assert "<script" not in drawn
        assert "&lt;script&gt;" in drawn
    assert "<script" not in html_page(EVIL, "<p>x</p>")
