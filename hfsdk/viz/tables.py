"""Tables and cards as self-contained HTML: no script, scoped style, well-formed XML, both themes.

An untrusted notebook drops ``<style>`` but keeps tables and inline styles: rows, sides, bars and swatches stand there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hfsdk.viz.frame import bytes_text, count_text, role_colors, seconds_text
from hfsdk.viz.modules import static
from hfsdk.viz.plain import clean, finite

MAX_TEXT = 400
MAX_SAMPLES = 6
MAX_COLUMNS = 80
MAX_METRIC_ROWS = 60
SHORT_CALL_S = 0.3
"""A call faster than this leaves one compact line."""

LEFT = ' style="text-align:left"'
NBSP = "\N{NO-BREAK SPACE}"
WRAP = ' style="text-align:left;white-space:pre-wrap;max-width:420px"'
BAR, BAR_DONE, BAR_BACK = "#3b82d6", "#2f9e50", "#a9b1ba"
"""Colours of bars where ``frame.css`` does not reach: seen on white and on black."""

MARK = "background:#ffd54d;color:#1a1a1a;padding:0 2px"
"""Style of a marked token in a text: seen in both themes."""

STATES = {
    "ready": ("●", "hf-good"), "pending": ("○", "hf-dim"), "running": ("◐", "hf-busy"), "failed": ("✕", "hf-bad"),
    "lost": ("⊘", "hf-bad"), "simulated": ("◇", "hf-dim"), "done": ("✓", "hf-good"), "cancelled": ("–", "hf-dim"),
    "loaded": ("●", "hf-good"), "declared": ("○", "hf-dim"), "open": ("●", "hf-good"), "closed": ("–", "hf-dim"),
    "working": ("◐", "hf-busy"), "idle": ("●", "hf-good"),
}  # fmt: skip
"""Sign and colour of a state; its name always stands next to them."""


def batch_html(data: Mapping[str, Any]) -> str:
    """Return a batch: its columns with kind, bytes, state and writer, and a few samples.

    ``data``: ``{"num_rows", "columns": [{"name", "kind", "dtype", "state", "bytes", "mean_length", "writer"}],
    "samples": [{"prompt", "response", "score"}]}``.
    """
    columns = data["columns"]
    rows = [
        [
            _cell(c["name"], "hf-left", code=True),
            _cell(c.get("kind"), "hf-left"),
            _cell(c.get("dtype"), "hf-left"),
            _missing() if finite(c.get("mean_length")) is None else _cell(f"{c['mean_length']:.1f}"),
            _missing() if finite(c.get("bytes")) is None else _cell(bytes_text(c["bytes"])),
            _state(c.get("state") or "pending"),
            _cell(c.get("writer"), "hf-left", code=True),
        ]
        for c in columns[:MAX_COLUMNS]
    ]
    head = ["column<", "kind<", "dtype<", "mean length", "bytes", "state<", "written by<"]
    sizes = [c["bytes"] for c in columns if finite(c.get("bytes")) is not None]
    title = f"Batch: {count_text(data['num_rows'])} samples, {len(columns)} columns" + (
        f", {bytes_text(sum(sizes))}" if sizes else ""
    )
    parts = [_title(title), _table(head, rows)]
    if len(columns) > MAX_COLUMNS:
        parts.append(_note(f"and {len(columns) - MAX_COLUMNS} more columns"))
    samples = list(data.get("samples") or [])
    if samples:
        body = [
            [
                _cell(str(i)),
                _text(s.get("prompt")),
                _text(s.get("response")),
                _missing() if finite(s.get("score")) is None else _cell(f"{s['score']:.4g}"),
            ]
            for i, s in enumerate(samples[:MAX_SAMPLES])
        ]
        shown = f"first {min(len(samples), MAX_SAMPLES)} of {count_text(data['num_rows'])} samples"
        parts.append(
            f'<details open=""><summary>{shown}</summary>{_table(["row", "prompt<", "response<", "score"], body)}</details>'
        )
    return _wrap("batch", parts)


def session_html(data: Mapping[str, Any]) -> str:
    """Return a session: runtime, roles with layouts and versions, memory, messages.

    ``data``: ``{"name", "runtime", "devices", "state", "roles": [{"name", "model", "train", "rollout", "dtype", "version",
    "state"}], "memory": [{"device", "used_bytes", "memory_bytes"}] or a text, "messages": [text]}``.
    """
    colors = role_colors({r["name"]: r.get("kind", r["name"]) for r in data["roles"]})
    facts = escape(f" · {data['runtime']} · {_devices(data.get('devices'))}")
    head = _title(f"Session {data.get('name') or ''}".strip())
    head += f"<div>{_state_text(data.get('state') or 'open')}{facts}</div>"
    rows = [
        [
            f'<td class="hf-left"{LEFT}>{_dot(colors[r["name"]])} <b>{escape(r["name"])}</b></td>',
            _cell(r.get("model") or "a function", "hf-left"),
            _cell(r.get("train"), "hf-left", code=True),
            _cell(r.get("rollout"), "hf-left", code=True),
            _cell(r.get("dtype"), "hf-left"),
            _cell(r.get("version")),
            _state(r.get("state") or "declared"),
        ]
        for r in data["roles"]
    ]
    parts = [head]
    if rows:
        parts.append(_table(["role<", "model<", "layout<", "rollout<", "dtype<", "version", "state<"], rows))
    else:
        parts.append(_note("no roles yet: session.actor(...), session.critic(...)"))
    parts += _memory(data.get("memory"))
    messages = [str(m) for m in data.get("messages") or []]
    if messages:
        items = "".join(f'<div class="hf-wrap">{escape(_cut(m))}</div>' for m in messages[-20:])
        parts.append(f"<details><summary>{len(messages)} message{'s' * (len(messages) != 1)}</summary>{items}</details>")
    return _wrap("session", parts)


def sessions_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the kept sessions: each one's devices, roles and run, and who has it.

    ``rows``: ``{"name", "devices", "since", "roles": [name], "run", "attached", "left", "column_bytes"}``.
    """
    if not rows:
        return _wrap("sessions", [_note("no kept sessions")])
    body = [
        [
            f'<td class="hf-left"{LEFT}><b>{escape(row["name"])}</b></td>',
            _cell(row["devices"], "hf-left"),
            _cell(row["since"], "hf-left"),
            _cell(", ".join(row["roles"]), "hf-left"),
            _text(row["run"] or "none"),
            _text(row["attached"] or row["left"] or "nobody"),
            _cell(bytes_text(row["column_bytes"])),
        ]
        for row in rows
    ]
    head = ["session<", "devices<", "since<", "roles<", "run<", "attached by<", "columns"]
    return _wrap("sessions", [_table(head, body)])


def snapshot_html(data: Mapping[str, Any]) -> str:
    """Return a snapshot: where each role's state lies, its bytes, and those it shares (``Snapshot.view()``)."""
    rows = [
        [
            _cell(p["role"], "hf-left"), _cell(p["updates"]), _cell(p["layout"], "hf-left", code=True), _cell(p["node"]),
            _cell(p["device"]), _cell(bytes_text(p["bytes"])), _cell(p["shared_with"] or None, "hf-left"),
        ]
        for p in data["parts"]
    ]  # fmt: skip
    size = f"{bytes_text(data['num_bytes'])}, {bytes_text(data['new_bytes'])} of them new, in the workers' host memory"
    facts = f"branch {data['branch']}, after {data['steps']} step{'s' * (data['steps'] != 1)}; {size}"
    functions = ", ".join(f"{role}: {function}" for role, function in data["functions"].items())
    head = ["role<", "updates", "layout<", "node", "device", "bytes", "shared with<"]
    parts = [_title(f"Snapshot {data['name']}"), _note(facts), _table(head, rows)]
    return _wrap("snapshot", parts + ([_note(functions)] if functions else []))


def first_bad_html(data: Mapping[str, Any]) -> str:
    """Return a first bad number: where it is, the sample, the tokens around it, and the cell that gets it (``FirstBad.view()``)."""
    places = data["places"]
    here = [_number(value) if isinstance(value, float) else _cell(str(value), "hf-left", code=True) for value in places.values()]
    parts = [_title(f"First bad number: {data['meaning']}"), _note(data["symptom"])]
    parts.append(f'<div class="hf-wrap">{escape(data["verdict"])}</div>')
    parts.append(_table([f"{name}<" for name in places], [here]))
    if data["text"]:
        before, _, rest = data["text"].partition("⟦")
        at, _, after = rest.partition("⟧")
        marked = f'{escape(before)}<mark style="{MARK}">{escape(at)}</mark>{escape(after)}' if rest else escape(before)
        parts.append(f'<div class="hf-wrap" style="white-space:pre-wrap">{marked}</div>')
    if data["rows"]:
        names = list(data["rows"][0])
        body = [[_of_token(name, row, data["token"]) for name in names] for row in data["rows"]]
        parts.append(_table([f"{name}<" if name == "token" else name for name in names], body))
    code = f'<pre style="text-align:left;white-space:pre-wrap">{escape(data["code"])}</pre>'
    parts.append(f"<details><summary>a cell that gets it again</summary>{code}</details>")
    return _wrap("first-bad", [*parts, _note(f"{data['left']}; {seconds_text(data['seconds'])}")])


def metrics_html(rows: Sequence[Mapping[str, float]]) -> str:
    """Return metrics, one row per mini-batch or step; missing numbers are drawn as missing."""
    names = list(dict.fromkeys(name for row in rows for name in row))[:MAX_COLUMNS]
    keep: list[int | None] = list(range(len(rows)))
    if len(rows) > MAX_METRIC_ROWS:
        half = MAX_METRIC_ROWS // 2
        keep = [*keep[:half], None, *keep[-half:]]
    body = []
    for i in keep:
        if i is None:
            body.append(
                [f'<td colspan="{len(names) + 1}" class="hf-left hf-dim"{LEFT}>and {len(rows) - MAX_METRIC_ROWS} more rows</td>']
            )
        else:
            body.append([_cell(str(i)), *(_number(rows[i].get(name)) for name in names)])
    title = f"Metrics: {len(rows)} row{'s' * (len(rows) != 1)}"
    return _wrap("metrics", [_title(title), _table(["row", *names], body) if names else _note("no metrics")])


def progress_html(data: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> str:
    """Return one progress card, or one card over the calls that one cell started.

    ``data``: ``{"call", "line", "state", "done", "total", "unit", "seconds", "error"}`` or several of them. Finished calls
    beyond the last eight are summed up in one line.
    """
    calls, folded = _folded(data)
    parts = []
    if folded:
        parts.append(f'<tr><td colspan="4" class="hf-left hf-dim"{LEFT}>{_sign("done")} {escape(_folded_text(folded))}</td></tr>')
    parts += [_progress_row(c) for c in calls]
    return _wrap("progress", [f'<table class="hf-calls"><tbody>{"".join(parts)}</tbody></table>'])


def progress_text(data: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> str:
    """Return the same as text, one line per call."""
    calls, folded = _folded(data)
    lines = [_folded_text(folded)] if folded else []
    for c in calls:
        counted = f", {_count(c)}" if c.get("done") is not None else ""
        took = "" if c.get("seconds") is None else f", {seconds_text(c['seconds'])}"
        error = f": {c['error']}" if c.get("error") else ""
        lines.append(f"{c['call']} ({c.get('line') or 'no line'}): {c['state']}{counted}{took}{error}")
    return clean("\n".join(lines))


# ---------------------------------------------------------------- parts


def _folded(data: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Split off the finished calls beyond the last eight."""
    calls = [data] if isinstance(data, Mapping) else list(data)
    folded = [c for c in calls if c["state"] == "done"][:-8]
    skip = {id(c) for c in folded}
    return [c for c in calls if id(c) not in skip], folded


def _folded_text(folded: list[Mapping[str, Any]]) -> str:
    seconds = sum(c.get("seconds") or 0.0 for c in folded)
    return f"{len(folded)} call{'s' * (len(folded) != 1)} done before these, {seconds_text(seconds)}"


def _progress_row(call: Mapping[str, Any]) -> str:
    state, done, total = call["state"], call.get("done"), call.get("total")
    seconds = finite(call.get("seconds"))
    short = state == "done" and (seconds or 0.0) < SHORT_CALL_S
    track = ""
    if not short and state in ("running", "done"):
        share = 1.0 if state == "done" else (done / total if done is not None and total else None)
        track = _track(share, done=state == "done")
    facts = [] if short or done is None else [_count(call)]
    facts += [] if seconds is None else [seconds_text(seconds)]
    if seconds and done and state == "done" and not short:
        facts.append(f"{count_text(round(done / seconds))} {call.get('unit') or ''}/s".replace(" /", "/"))
    where = escape(str(call.get("line") or ""))
    row = (
        f'<tr><td class="hf-left"{LEFT}>{_sign(state)} <code>{escape(str(call["call"]))}</code></td>'
        f'<td class="hf-left hf-dim"{LEFT}>{where}</td><td class="hf-left"{LEFT}>{track or escape(state)}</td>'
        f'<td class="hf-left hf-num hf-dim"{LEFT}>{escape(" · ".join(facts))}</td></tr>'
    )
    if call.get("error"):
        row += f'<tr><td colspan="4" class="hf-wrap hf-bad hf-error"{WRAP}>{escape(_cut(str(call["error"])))}</td></tr>'
    return row


def _track(share: float | None, done: bool = False) -> str:
    """Return a bar that is full to ``share``; ``None``: something goes on, nobody knows how far."""
    color = BAR_DONE if done else BAR
    width = "30%" if share is None else f"{100 * max(0.0, min(1.0, share)):.1f}%"
    css = "hf-go" if share is None else "hf-done" if done else "hf-part"
    inner = f'<i class="{css}" style="display:block;height:7px;width:{width};background-color:{color}"></i>'
    back = f"display:inline-block;width:120px;height:7px;background-color:{BAR_BACK}"
    return f'<span class="hf-track hf-inline" style="{back}">{inner}</span>'


def _count(call: Mapping[str, Any]) -> str:
    total = call.get("total")
    upto = f" of {count_text(total)}" if total is not None and total != call["done"] else ""
    return f"{count_text(call['done'])}{upto} {call.get('unit') or ''}".strip()


def _wrap(name: str, parts: Iterable[str]) -> str:
    return f'<div class="hf hf-{name}"><style>{static("frame.css")}</style>{clean("".join(parts))}</div>'


def _title(text: str) -> str:
    return f'<div class="hf-title" style="font-weight:600">{escape(text)}</div>'


def _note(text: str) -> str:
    return f'<div class="hf-dim">{escape(text)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out cells; a heading that ends with ``<`` is left-aligned."""
    sides = [("hf-left" if h.endswith("<") else "hf-right", h.rstrip("<")) for h in head]
    cells = "".join(f'<th scope="col" class="{side}"{_side(side)}>{escape(text)}</th>' for side, text in sides)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any, css: str = "hf-right", code: bool = False) -> str:
    if value is None or value == "":
        return f'<td class="{css} hf-dim"{_side(css)}>–</td>'
    text = escape(_cut(str(value)))
    if css == "hf-right":
        text = text.replace(" ", NBSP)  # a number keeps its unit, also where no style says so
    return f'<td class="{css}"{_side(css)}>{f"<code>{text}</code>" if code else text}</td>'


def _side(css: str) -> str:
    return LEFT if "hf-left" in css else ' style="text-align:right"'


def _missing() -> str:
    return '<td class="hf-missing" title="not measured">–</td>'


def _number(value: Any) -> str:
    if value is None:
        return _missing()
    if isinstance(value, str):
        return _cell(value)
    if not math.isfinite(value):
        return f'<td class="hf-bad">{value}</td>'
    return _cell(count_text(value) if abs(value) < 1e6 or float(value).is_integer() else f"{value:.3e}")


def _of_token(name: str, row: Mapping[str, Any], token: int | None) -> str:
    """Return a cell of the tokens around; that of the token itself is marked."""
    value = row[name]
    if name == "token":
        return _cell("␣" * len(value) if value == " " * len(value) else repr(value)[1:-1], "hf-left", code=True)
    if name == "position" and value == token:
        return f"<td><b>▶ {value}</b></td>"
    if isinstance(value, float) and not math.isfinite(value):
        return f'<td class="hf-bad"><b>{value}</b></td>'
    return _number(value)


def _text(value: Any) -> str:
    return _missing() if value is None else f'<td class="hf-wrap"{WRAP}>{escape(_cut(str(value)))}</td>'


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"


def _sign(state: str) -> str:
    sign, css = STATES.get(state, ("·", "hf-dim"))
    return f'<span class="{css}" aria-hidden="true">{sign}</span>'


def _state_text(state: str) -> str:
    return f"{_sign(state)}{NBSP}{escape(state)}"


def _state(state: str) -> str:
    return f'<td class="hf-left"{LEFT}>{_state_text(state)}</td>'


def _dot(color: str) -> str:
    return f'<i class="hf-dot" style="display:inline-block;width:9px;height:9px;background-color:{color}"></i>'


def _devices(devices: Any) -> str:
    return f"{devices} device{'s' * (devices != 1)}" if isinstance(devices, int) else str(devices or "no devices")


def _memory(memory: Any) -> list[str]:
    if not memory:
        return []
    if isinstance(memory, str):
        return [_note(f"memory: {memory}")]
    rows = []
    for device in memory:
        used, limit = device.get("used_bytes"), device.get("memory_bytes")
        share = _track(used / limit) if used is not None and limit else ""
        rows.append([
            _cell(f"device {device['device']}", "hf-left"),
            _missing() if used is None else _cell(bytes_text(used)),
            _cell(None if limit is None else bytes_text(limit)),
            f'<td class="hf-left"{LEFT}>{share}</td>' if share else _missing(),
        ])  # fmt: skip
    return [f"<details><summary>memory</summary>{_table(['device<', 'measured', 'limit', 'share<'], rows)}</details>"]
