"""The token picture: prompts and responses token by token, each token's box coloured by its own number.

::

    sample | score | text            sample 3, score +0.42, 21 tokens, stop
    3      | +0.42 | keeps you ...   [the| film| is| ]  [a|~~wonder~~|ful|⏎]
    0      | -0.10 | too long ...     prompt: grey       boxes: blue above, orange below 0; clipped tokens cross-hatched

The view carries each column once, as packed float32 (`tokenmath.pack`); what follows from two columns (KL, ratio,
trainer minus rollout) is computed in the browser, and here for the text and the static drawing. ``data-row`` of a response
token is its row in ``batch.to_pandas("tokens")`` of the whole batch.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.columns import COLUMNS, label_of
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Ragged
from hfsdk.core.tokens import MOST_OF_SAMPLE, Tokens
from hfsdk.viz import tokenmath
from hfsdk.viz.frame import Picture, count_text
from hfsdk.viz.plain import clean
from hfsdk.viz.tokenmath import Array, pack, unpack

LISTED = (
    "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns", "entropy",
)  # fmt: skip
"""Columns that are said to be missing where they are."""
FIRST_CHOICE = ("ratio", "advantages", "kl", "values", "old_log_probs", "rollout_log_probs")
OUTLIERS = 0.02
"""Share of the tokens beyond the end of the colour scale."""
MOST_WORDS = 200
"""Longest text of a sample's own column, in characters."""
TEXT_SAMPLES, TEXT_TOKENS = 6, 40


class FieldView(TypedDict):
    """A number that can colour the tokens: a column, or one computed from two of them."""

    name: str
    label: str
    op: Literal["column", "subtract", "k3", "ratio"]
    of: list[str]
    kind: Literal["signed", "ratio", "sequential"]
    end: float
    """The value at which the colour is full (and its negative where signed); the logarithm of it for a ratio."""


class SampleView(TypedDict):
    """One sample; tokens index the vocabulary."""

    row: int
    first_row: int
    prompt: list[int]
    response: list[int]
    numbers: dict[str, float | str]
    """One per column with a number per sample; ``"NaN"``, ``"∞"`` and ``"-∞"`` as texts, for JSON has none."""
    words: dict[str, str]


class TokensView(TypedDict):
    """All the token picture needs."""

    picture: Literal["tokens"]
    title: str
    summary: str
    note: str
    num_rows: int
    color: str
    clip: dict[str, Any] | None
    vocabulary: list[list[Any]]
    """``[id, as drawn, text or None where it is the same, bytes in hex where they are no text, else None]``."""
    columns: dict[str, str]
    fields: list[FieldView]
    missing: list[dict[str, str]]
    samples: list[SampleView]
    ignored: list[str]


def tokens_view(tokens: Tokens) -> TokensView:
    """Turn some samples of a batch into the view of the picture.

    Raises:
        OptionError: ``color`` is none of the fields there are.
    """
    whole, tokens = tokens, tokens.shortened()
    table, response = tokens.table, tokens.table.ragged("response")
    columns, ignored = _columns(tokens)
    fields = _fields(tokens, columns)
    field_names = [f["name"] for f in fields]
    if tokens.color is not None and tokens.color not in field_names:
        raise OptionError(f"color={tokens.color!r} is none of the numbers per token there are: {', '.join(field_names) or 'none'}")
    ids = {token: i for i, token in enumerate(tokens.vocabulary)}
    prompts = next((c for name, c in table.items() if name == "prompt" and isinstance(c, Ragged)), None)
    samples: list[SampleView] = []
    facts = {n: c for n, c in table.items() if not isinstance(c, Ragged)}
    for i, row in enumerate(tokens.rows):
        numbers, words = _facts(facts, i)
        samples.append({
            "row": int(row), "first_row": int(tokens.first_rows[i]),
            "prompt": [ids[int(t)] for t in prompts[i]] if prompts is not None else [],
            "response": [ids[int(t)] for t in response[i]], "numbers": numbers, "words": words,
        })  # fmt: skip
    shown, total = len(samples), tokens.num_rows
    note = "" if shown == total else f"{shown} of {total} samples shown; batch.tokens(rows=...) chooses others"
    if tokens is not whole:
        note += f"{'; ' * bool(note)}of each text at most {MOST_OF_SAMPLE:,} tokens are drawn"
    summary = f"{shown} of {total} samples with {len(response.flat)} response tokens; numbers per token: "
    return {
        "picture": "tokens", "title": f"tokens of {count_text(shown)} sample{'s' * (shown != 1)}",
        "summary": summary + (", ".join(f["label"] for f in fields) or "none"), "note": note, "num_rows": total,
        "color": tokens.color or next((n for n in (*FIRST_CHOICE, *field_names) if n in field_names), ""),
        "clip": _clip(tokens, columns), "vocabulary": [_word(i, raw) for i, raw in tokens.vocabulary.items()],
        "columns": {name: pack(column) for name, column in columns.items()}, "fields": fields,
        "missing": _missing(tokens, columns), "samples": samples, "ignored": ignored,
    }  # fmt: skip


def visible(text: str) -> str:
    """Return text in which nothing is invisible: spaces, line ends, control and direction marks have signs of their own."""
    return "".join(_sign(c) for c in text)


class TokensPicture(Picture):
    """Prompts and responses token by token. ``TokensPicture(tokens_view(batch.tokens()))``."""

    name = "tokens"

    def to_text(self) -> str:
        """Return the first samples as text, and the first of them token by token."""
        return "\n".join(_lines(self.view))


# ---------------------------------------------------------------- parts of the view


def _columns(tokens: Tokens) -> tuple[dict[str, Array], list[str]]:
    """Split off the columns that cannot be drawn per token."""
    lengths = tokens.table.ragged("response").lengths
    columns: dict[str, Array] = {}
    ignored = []
    for name, column in tokens.table.items():
        if name in SEQUENCES or not isinstance(column, Ragged):
            continue
        if np.array_equal(column.lengths, lengths) and column.dtype.kind in "fiub":
            columns[name] = column.flat.astype(np.float32)
        else:
            ignored.append(f"{name}: not one number per response token")
    same = {"kl", "ref_log_probs", tokens.old} <= set(columns)
    if same and np.array_equal(columns["kl"], tokenmath.subtract(columns[tokens.old], columns["ref_log_probs"]), equal_nan=True):
        del columns["kl"]  # it follows from the two, to the bit: the browser subtracts
    return columns, ignored


def _fields(tokens: Tokens, columns: Mapping[str, Array]) -> list[FieldView]:
    fields: list[FieldView] = []
    bound = math.log1p(tokens.clip if tokens.clip_high is None else tokens.clip_high)  # full colour where clipping begins

    def add(name: str, label: str, op: Any, *of: str) -> None:
        if all(n in columns for n in of):
            numbers = compute(op, [columns[n] for n in of])
            kind = "ratio" if op == "ratio" else _kind(name, numbers)
            end = bound if op == "ratio" else _end(numbers, kind)
            fields.append({"name": name, "label": label, "op": op, "of": list(of), "kind": kind, "end": end})

    new, old = tokens.new, tokens.old
    if new is not None:
        add("ratio", f"ratio exp({new} - {old})", "ratio", new, old)
    for name in ("advantages", "rewards", "values", "returns"):
        add(name, label_of(name), "column", name)
    if "kl" in columns:
        add("kl", "KL k1 (old - reference)", "column", "kl")
    else:
        add("kl", "KL k1 (old - reference)", "subtract", old, "ref_log_probs")
    add("kl_k3", "KL k3", "k3", old, "ref_log_probs")
    labels = {old: label_of("old_log_probs")} | ({new: "log-prob (new)"} if new is not None else {})
    for name in (old, *([new] if new is not None else []), "ref_log_probs", "rollout_log_probs", "entropy"):
        add(name, labels.get(name) or label_of(name), "column", name)
    add("difference", "trainer - rollout log-prob", "subtract", old, "rollout_log_probs")
    for name in columns:
        if name not in {f["name"] for f in fields}:
            add(name, labels.get(name) or label_of(name), "column", name)
    return fields


def _missing(tokens: Tokens, columns: Mapping[str, Array]) -> list[dict[str, str]]:
    gone = [{"label": label_of(n), "hint": COLUMNS[n].writer} for n in LISTED if n not in columns]
    if not {"old_log_probs", "ref_log_probs"} <= set(columns) and "kl" not in columns:
        gone.append({"label": "KL", "hint": "actor and reference.compute_log_probs"})
    if tokens.new is None:
        gone.append({"label": "ratio", "hint": "batch.tokens(new=actor.compute_log_probs(batch)) after an update"})
    return gone


def _kind(name: str, numbers: Array) -> Literal["signed", "sequential"]:
    if name in ("values", "rewards", "advantages", "returns", "kl", "difference"):
        return "signed"
    finite = numbers[np.isfinite(numbers)]
    return "signed" if len(finite) and finite.min() < 0 < finite.max() else "sequential"


def _end(numbers: Array, kind: str) -> float:
    """Return where the colour is full: nearly the largest size, so that one outlier does not wash out the rest."""
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if not len(finite):
        return 1.0
    end = float(np.quantile(np.abs(finite), 1 - OUTLIERS)) or float(np.abs(finite).max()) or 1.0
    return -end if kind == "sequential" and finite.min() < 0 else end


def _clip(tokens: Tokens, columns: Mapping[str, Array]) -> dict[str, Any] | None:
    if tokens.new is None:
        return None
    high = tokens.clip if tokens.clip_high is None else tokens.clip_high
    has_advantages = "advantages" in columns  # without them nobody knows in which direction the loss pulls
    return {"low": tokens.clip, "high": float(high), "new": tokens.new, "old": tokens.old, "known": has_advantages}


def _facts(columns: Mapping[str, Any], i: int) -> tuple[dict[str, float | str], dict[str, str]]:
    numbers: dict[str, float | str] = {}
    words: dict[str, str] = {}
    for name, column in columns.items():
        value = column[i]
        if isinstance(value, (int, float, np.number, np.bool_)):
            numbers[name] = float(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
        else:
            text = clean(str(value))
            words[name] = text if len(text) <= MOST_WORDS else text[:MOST_WORDS] + "…"
    return numbers, words


def _word(token_id: int, raw: bytes) -> list[Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return [token_id, visible(raw.decode("utf-8", "backslashreplace")), "", raw.hex()]
    shown = visible(text) or f"‹{token_id}›"
    return [token_id, shown, None if shown == text else text, None]


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x21:
        return {" ": "␣", "\n": "⏎", "\t": "⇥"}.get(char) or chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(char) in ("Cc", "Cf", "Co", "Cn", "Zs", "Zl", "Zp") or code in (0xFFFE, 0xFFFF):
        return f"‹U+{code:04X}›"
    return "◌" + char if unicodedata.category(char).startswith("M") else char


# ---------------------------------------------------------------- text


def sample_text(view: Mapping[str, Any], indices: Sequence[int]) -> str:
    """Return tokens as one text; bytes that are no text give the replacement sign."""
    words = [view["vocabulary"][i] for i in indices]
    return b"".join(
        bytes.fromhex(w[3]) if w[3] is not None else (w[1] if w[2] is None else w[2]).encode("utf-8", "replace") for w in words
    ).decode("utf-8", "replace")


def _lines(view: Mapping[str, Any]) -> Iterator[str]:
    yield f"{view['title']}: {view['summary']}"
    if view["note"]:
        yield view["note"]
    starts, dropped = offsets(view), clipped_tokens(view)
    for i, sample in enumerate(view["samples"][:TEXT_SAMPLES]):
        score = sample["numbers"].get("scores")
        words = "no score" if score is None else f"score {score:+.4g}" if isinstance(score, float) else f"score {score}"
        facts = [f"sample {sample['row']}", words]
        facts.append(f"{len(sample['response'])} tokens")
        if view["clip"]:
            count = int(dropped[starts[i] : starts[i + 1]].sum())
            facts.append(f"{count} clipped" if view["clip"]["known"] else "clipping not known without advantages")
        texts = [visible(sample_text(view, sample[part])).replace("␣", " ") for part in SEQUENCES]
        yield f"  {', '.join(facts)}: {texts[0][-60:]} | {texts[1][:100]}"
    if len(view["samples"]) > TEXT_SAMPLES:
        yield f"  and {len(view['samples']) - TEXT_SAMPLES} more samples"
    field = next((f for f in view["fields"] if f["name"] == view["color"]), None)
    if field is None or not view["samples"]:
        return
    sample, numbers = view["samples"][0], field_values(view, field)
    yield f"sample {sample['row']} by {field['label']}:"
    for k, index in enumerate(sample["response"][:TEXT_TOKENS]):
        mark = "  clipped: no gradient" if dropped[k] else ""
        yield f"  {sample['first_row'] + k:>6} {view['vocabulary'][index][1]:<12} {numbers[k]:>+12.5g}{mark}"
    if len(sample["response"]) > TEXT_TOKENS:
        yield f"  and {len(sample['response']) - TEXT_TOKENS} more tokens"


# -- the numbers of a field


def field_values(view: Mapping[str, Any], field: Mapping[str, Any]) -> Array:
    """Return a field's numbers over the tokens of all samples shown, float32, shape [T]."""
    parts = [unpack(view["columns"][name]) for name in field["of"]]
    return compute(field["op"], parts)


def compute(op: str, parts: Sequence[Array]) -> Array:
    """Return the numbers computed from one or two columns."""
    if op == "column":
        return parts[0]
    return {"subtract": tokenmath.subtract, "k3": tokenmath.k3, "ratio": tokenmath.ratio}[op](*parts)


def clipped_tokens(view: Mapping[str, Any]) -> Array:
    """Return which tokens clipping leaves without gradient, bool, shape [T] (none where nothing can be clipped)."""
    clip = view["clip"]
    if clip is None or not clip["known"]:
        return np.zeros(sum(len(s["response"]) for s in view["samples"]), dtype=bool)
    columns = {name: unpack(view["columns"][name]) for name in (clip["new"], clip["old"], "advantages")}
    ratios = tokenmath.ratio(columns[clip["new"]], columns[clip["old"]])
    return tokenmath.clipped(ratios, columns["advantages"], clip["low"], clip["high"])


def offsets(view: Mapping[str, Any]) -> list[int]:
    """Return where each sample's tokens begin among all tokens shown."""
    lengths = [len(s["response"]) for s in view["samples"]]
    return [0, *np.cumsum(lengths).tolist()] if lengths else [0]
