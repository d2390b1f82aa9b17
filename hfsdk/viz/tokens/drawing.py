"""The static drawing of a tokens view: the first samples, coloured by the chosen field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.viz.frame import svg_document, svg_text, tag
from hfsdk.viz.tokens.fields import clipped_tokens, field_values, offsets, strength

POSITIVE, NEGATIVE, STRONG = "#2f7fd0", "#e0761b", "#8a63c9"
WIDTH, LINE, CHAR, PAD = 980, 24, 7.0, 5.0
MOST_SAMPLES, MOST_TOKENS, MOST_CHARS = 3, 240, 40
PROMPT_TOKENS = 40


class Drawing:
    """A few samples as boxes that flow like text."""

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.view = view
        self.field = next((f for f in view["fields"] if f["name"] == view["color"]), None)
        self.numbers = field_values(view, self.field) if self.field else None
        self.clipped = clipped_tokens(view)
        self.starts = offsets(view)

    def svg(self) -> str:
        """Return the whole document."""
        view = self.view
        parts = [svg_text(2, 15, view["title"], font_weight=600, font_size=13)]
        parts.append(svg_text(2, 31, view["note"] or f"all {view['num_rows']} samples", class_="sub"))
        y, room = 50.0, MOST_TOKENS
        shown = 0
        for i, sample in enumerate(view["samples"][:MOST_SAMPLES]):
            if room <= 0:
                break
            drawn, y = self._sample(i, sample, y, room)
            room -= len(sample["response"])
            parts.append(drawn)
            shown += 1
        rest = len(view["samples"]) - shown
        if rest or not shown:
            parts.append(svg_text(2, y + 4, f"and {rest} more samples" if rest else "no samples", class_="sub"))
            y += 18
        legend, y = self._legend(y + 6)
        return svg_document(WIDTH, y + 10, view["title"], view["summary"], _PATTERN + "".join(parts) + legend)

    def _sample(self, i: int, sample: Mapping[str, Any], y: float, room: int) -> tuple[str, float]:
        score = sample["numbers"].get("scores")
        words = [f"sample {sample['row']}", _score(score), f"{len(sample['response'])} tokens"]
        if self.view["clip"] and self.view["clip"]["known"]:
            words.append(f"{int(self.clipped[self.starts[i] : self.starts[i + 1]].sum())} clipped")
        parts = [svg_text(2, y + 4, " · ".join(words), font_weight=600)]
        x, y = 2.0, y + 12
        cut = len(sample["prompt"]) - PROMPT_TOKENS
        if cut > 0:
            parts.append(svg_text(x, y + 14, "…", class_="sub", text_anchor="start"))
            x += 14
        tokens: list[tuple[int, int | None]] = [(index, None) for index in sample["prompt"][max(0, cut) :]]
        tokens += [(index, k) for k, index in enumerate(sample["response"][:room])]
        for index, k in tokens:
            text = self.view["vocabulary"][index][1]
            text = text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"
            width = max(1, len(text)) * CHAR + PAD
            if x + width > WIDTH - 4:
                x, y = 2.0, y + LINE
            parts.append(self._token(x, y, width, text, i, sample, k))
            x += width + 2
        if len(sample["response"]) > room:
            words_left = f"and {len(sample['response']) - room} more tokens"
            parts.append(svg_text(x + 4, y + 14, words_left, class_="sub", text_anchor="start"))
        return parts[0] + tag("g", "".join(parts[1:]), text_anchor="middle", font_family="monospace"), y + LINE + 16

    def _token(self, x: float, y: float, width: float, text: str, i: int, sample: Mapping[str, Any], k: int | None) -> str:
        label = svg_text(x + width / 2, y + 14, text, class_="sub" if k is None else "fg")
        if k is None:
            return label
        row, at = sample["first_row"] + k, self.starts[i] + k
        drawn = tag("rect", x=x, y=y, width=width, height=20, rx=2, class_="none", data_row=row)
        if self.numbers is not None and self.field is not None:
            drawn = self._box(x, y, width, strength(float(self.numbers[at]), self.field), row)
        if self.clipped[at]:
            drawn += _clip_mark(x, y, width)
        return drawn + label

    def _box(self, x: float, y: float, width: float, t: float | None, row: int | None) -> str:
        assert self.field is not None
        if t is None:
            return tag("rect", x=x, y=y, width=width, height=20, fill="none", class_="edge", stroke_dasharray="2 2", data_row=row)
        sequential = self.field["kind"] == "sequential"
        color = STRONG if sequential else NEGATIVE if t < 0 else POSITIVE
        box = tag("rect", x=x, y=y, width=width, height=20, rx=2, fill=color, fill_opacity=0.64 * abs(t) ** 0.8, data_row=row)
        if not sequential and abs(t) > 0.04:
            box += tag("rect", x=x, y=y if t > 0 else y + 18, width=width, height=2, fill=color)
        return box

    def _legend(self, y: float) -> tuple[str, float]:
        if self.field is None:
            return svg_text(2, y + 10, "no numbers per token yet", class_="sub"), y + 14
        field, parts = self.field, [svg_text(2, y + 14, self.field["label"] + ":", class_="sub")]
        x = 10 + len(field["label"]) * 6.2
        steps = [0.0, 0.5, 1.0] if field["kind"] == "sequential" else [-1.0, -0.5, 0.0, 0.5, 1.0]
        for t in steps:
            value = 2.718281828459045 ** (t * field["end"]) if field["kind"] == "ratio" else t * field["end"]
            parts.append(self._box(x, y, 58, t, None) + svg_text(x + 29, y + 14, f"{value:.3g}", text_anchor="middle"))
            x += 60
        words = "line above: positive, below: negative" if field["kind"] != "sequential" else ""
        if field["kind"] == "ratio":
            words = "line above: over 1, below: under 1"
        parts.append(svg_text(x + 8, y + 14, words, class_="sub"))
        clip = self.view["clip"]
        if clip and clip["known"]:
            y += 26
            parts.append(_clip_mark(2, y - 2, 20))
            text = f"clipped, zero gradient: ratio > {1 + clip['high']:g} with A > 0, < {1 - clip['low']:g} with A < 0"
            parts.append(svg_text(28, y + 12, text, class_="sub"))
        return "".join(parts), y + 22


def _clip_mark(x: float, y: float, width: float) -> str:
    """Cross-hatch the lower edge only, so that the text stays readable."""
    strip = tag("rect", x=x, y=y + 14.5, width=width, height=5.5, fill="url(#hf-clipped)")
    return strip + tag("rect", x=x, y=y, width=width, height=20, fill="none", class_="edge", stroke_dasharray="3 2")


def _score(score: float | str | None) -> str:
    if score is None:
        return "score not measured"
    return f"score {score:+.4g}" if isinstance(score, float) else f"score {score}"


_PATTERN = (
    '<defs><pattern id="hf-clipped" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0,0H4M0,0V4" fill="none" class="edge"/></pattern></defs>'
)
