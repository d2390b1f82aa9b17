"""The history's picture: the session's branches as a tree, each with its steps, its snapshots and its last score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from hfsdk.viz.frame import OTHER_COLORS, ROLE_COLORS, Picture, html_page
from hfsdk.viz.plain import cut, finite
from hfsdk.viz.svg import svg_document, svg_text, tag

COLORS = (*ROLE_COLORS.values(), *OTHER_COLORS)
LEFT, ROW, DOT, MOST_DOTS = 230, 34, 13, 26
WIDTH = LEFT + MOST_DOTS * DOT + 330
MOST_NAME, MOST_WORDS = 26, 52
"""Characters that there is room for."""


class LineageView(TypedDict):
    """All the picture needs: ``History.tree()`` with where each branch begins on the time axis."""

    picture: str
    title: str
    summary: str
    branches: list[dict[str, Any]]


def lineage_view(data: Mapping[str, Any]) -> LineageView:
    """Turn ``History.view()`` into the view of the picture."""
    branches: list[dict[str, Any]] = []
    starts: dict[str, int] = {}
    shared: dict[str, int] = {}
    for b in data["tree"]:
        rows = [row for row in data["rows"] if row.get("branch") == b["name"]]
        marked = [i + 1 for i, row in enumerate(rows) if b_marks(row)]
        starts[b["name"]] = starts.get(b["parent"], 0) + shared.get(b["name"], 0)
        for child in data["tree"]:
            if child["parent"] == b["name"]:
                at = [i + 1 for i, row in enumerate(rows) if child["snapshot"] in b_marks(row)]
                shared[child["name"]] = at[-1] if at else 0
        branches.append({**b, "score": finite(b["score"]), "start": starts[b["name"]], "num_rows": len(rows), "marked": marked})
    title = f"History: {len(data['rows'])} rows on {len(branches)} branch{'es' * (len(branches) != 1)}"
    return {"picture": "lineage", "title": title, "summary": f"{title}, now on {data['branch']}", "branches": branches}


def b_marks(row: Mapping[str, Any]) -> list[str]:
    """Return the snapshots taken after a row."""
    return [name for name in str(row.get("snapshot") or "").split(", ") if name]


class LineagePicture(Picture):
    """``LineagePicture(lineage_view(history.view()))``; a still picture."""

    name = "lineage"

    def to_text(self) -> str:
        """Return one line per branch."""
        lines = [self.view["title"]]
        for b in self.view["branches"]:
            lines.append(f"{'*' if b['current'] else ' '} {'  ' * b['depth']}{b['name']}: {_words(b)}")
        return "\n".join(lines)

    def to_html(self, full: bool = False) -> str:
        """Return the SVG as HTML; ``full`` for a whole page."""
        return html_page(self.view["title"], self.placeholder()) if full else self.placeholder()

    def to_svg(self) -> str:
        """Return the tree: a dot per step or update, a ring where a snapshot was taken, an arm where a branch left."""
        branches = self.view["branches"]
        body = svg_text(4, 15, self.view["title"], font_weight=600, font_size=13)
        longest = max([b["start"] + b["num_rows"] for b in branches], default=1)
        dot = DOT * min(1.0, MOST_DOTS / max(1, longest))
        place = {b["name"]: 44 + i * ROW for i, b in enumerate(branches)}
        for i, b in enumerate(branches):
            y, color, x0 = place[b["name"]], COLORS[i % len(COLORS)], LEFT + b["start"] * dot
            name = ("▸ " if b["current"] else "") + cut(b["name"], MOST_NAME)
            body += svg_text(LEFT - 16, y + 4, name, text_anchor="end", font_weight=600 if b["current"] else None)
            if b["parent"] in place:
                up = place[b["parent"]]
                body += tag("path", d=f"M{x0:.1f},{up} V{y} H{x0 + dot / 2:.1f}", fill="none", stroke=color, stroke_width=1.5)
            if b["num_rows"]:
                body += tag("line", x1=x0, x2=x0 + b["num_rows"] * dot, y1=y, y2=y, stroke=color, stroke_width=1.5)
            for k in range(1, b["num_rows"] + 1):
                body += tag("circle", cx=x0 + k * dot, cy=y, r=min(3.2, dot / 2.5), fill=color, data_row=k - 1)
            for k in b["marked"]:
                body += tag("circle", cx=x0 + k * dot, cy=y, r=5.5, fill="none", stroke=color, stroke_width=1.4)
            body += svg_text(x0 + b["num_rows"] * dot + 12, y + 4, cut(_words(b), MOST_WORDS), class_="sub", font_size=10)
        return svg_document(WIDTH, 44 + ROW * max(1, len(branches)), self.view["title"], self.view["summary"], body)


def _words(b: Mapping[str, Any]) -> str:
    words = [f"from {cut(b['snapshot'], 16)!r}"] if b["parent"] else []
    words += [f"{len(b['steps'])} step{'s' * (len(b['steps']) != 1)}"] if b["steps"] else []
    words += [f"{b['updates']} update{'s' * (b['updates'] != 1)} by hand"] if b["updates"] else []
    words += [f"score {b['score']:.3f}"] if b["score"] is not None else []
    return ", ".join(words) or "nothing yet"
