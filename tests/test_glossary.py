"""The glossary names what exists: hfsdk's names, columns, papers and entries that are linked to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from expect import each

import hfsdk as hf
from hfsdk.core.columns import COLUMNS
from hfsdk.models import ActorModel, CostModel, CriticModel, ReferenceModel, RewardModel

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n?)*)", GLOSSARY, re.M))
OWNERS = {
    "hf": hf, "session": hf.Session, "actor": ActorModel, "critic": CriticModel, "reference": ReferenceModel, "reward": RewardModel,
    "cost": CostModel, "batch": hf.Batch, "trace": hf.Trace, "plan": hf.Plan,
}  # fmt: skip


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def exists(name: str) -> bool:
    first, *rest = name.split(".")
    owner = OWNERS[first]
    for part in rest:
        if part in {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else False:
            return part == rest[-1]
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


@each("term", ENTRIES)
def test_what_an_entry_names_in_hfsdk_exists(term):
    text = ENTRIES[term]
    if text.startswith("See ["):
        return
    (here,) = re.findall(r"^Here: (.+)$", text, re.M)
    for kind, name in re.findall(r"(column )?`([^`]+)`", here):
        assert name in COLUMNS if kind else exists(name), f"{term}: {name}"


def test_a_name_that_does_not_exist_is_noticed():
    assert not exists("hf.PPO.clip_hihg")
    assert not exists("session.plane")
    assert exists("hf.PPO.clip")


def test_entries_are_in_alphabetical_order():
    assert [*ENTRIES] == sorted(ENTRIES, key=str.casefold)


@each("page", ["README.md", "docs/glossary.md", "docs/beside.md", "docs/looking.md", "docs/recipes.md"])
def test_links_to_entries_resolve(page):
    text = (ROOT / page).read_text()
    wanted = re.findall(r"glossary\.md#([\w-]+)\)", text) + (re.findall(r"\]\(#([\w-]+)\)", text) if "glossary" in page else [])
    assert wanted
    assert set(wanted) <= {anchor(term) for term in ENTRIES}


def test_links_to_other_pages_resolve():
    assert [page for page in re.findall(r"\]\(([\w-]+\.md)\)", GLOSSARY) if not (ROOT / "docs" / page).exists()] == []


def test_papers_are_those_that_the_code_and_its_pages_cite():
    pages = [
        *ROOT.glob("hfsdk/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *(p for p in ROOT.glob("docs/*.md") if p.name != "glossary.md"),
    ]
    cited = "".join(page.read_text() for page in pages)
    for text, link in re.findall(r"\[arXiv ([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", GLOSSARY):
        assert text == link
        assert text in cited, text
