"""The view of a weight transition: per rank, per pair of ranks, per rung of the ladder, and box by box for some parameters.

Layers that lie alike move alike, so the boxes are those of the first layer and of what is in no layer. Some of many ranks are shown
box by box, and the matrix brings ranks together; nothing is counted twice or left out of a sum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypedDict

from hfsdk.core.errors import OptionError
from hfsdk.core.layout import Coordinates
from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import Box, megatron_ends, megatron_layer, vllm_ends, vllm_layer
from hfsdk.resharding.layer_sections import Section
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import ReshardReport
from hfsdk.viz.frame import OTHER_COLORS, TRANSFER_COLOR, Picture, bytes_text, html_page
from hfsdk.viz.plain import plain
from hfsdk.viz.svg import Hatches, ink_on, svg_document, svg_text, tag

MOST_RANKS = 32
"""A matrix of more ranks brings together those of a node, or equal runs of them."""
MOST_WRONG = 8
"""Most wrong boxes that are named."""
BOX_RANKS = 8
"""Most ranks that are shown box by box."""

IN_PLACE, COPIED, SAME_NODE, NETWORK = range(4)
WAYS = ("same in both, may stay in place", "copied on its rank", "moved within a node", "moved across the network")
PROVEN, UNPROVEN, WRONG = range(3)
PROOFS = ("proven", "unproven", "wrong")
TEXT_RANKS = 16
"""Most ranks that have a line of text."""
BAR_RANKS = 32
"""Most ranks that have a bar."""

NOTES = {
    "qkv_proj": "the trainer has per kv group its queries, its key, its value; the rollout all queries, then all keys, all values",
    "gate_up_proj": "the gate's rows, then the up-projection's, of this rank's part of the MLP",
    "embed_tokens": "rows of the vocabulary, padded to a multiple that the tensor-parallel size divides",
    "lm_head": "rows of the vocabulary, padded to a multiple that the tensor-parallel size divides",
    "o_proj": "cut by columns: every rank has all rows and its heads' columns",
    "down_proj": "cut by columns: every rank has all rows and its part of the MLP's columns",
}
"""Parameter -> how it lies."""


class RankBytesView(TypedDict):
    """Bytes of one rank over all parameters; ``row`` is its row in ``to_pandas()``."""

    row: int
    rank: int
    node: int
    train: str
    rollout: str
    held: int
    needed: int
    own: int
    received: int
    aside: int
    measured: int | None
    """Received."""
    own_measured: int | None
    sources: list[int]
    """Ranks that it receives from."""
    boxes: list[int] | None
    """How many boxes it took that are proven, unproven and wrong; ``None`` of a plan."""


class ParameterView(TypedDict):
    """One parameter of the rollout, box by box.

    A box is [tensor, first row, first column, rows, columns, row here, column here]; a piece of ``after`` adds the rank it comes
    from, its way (an index into ``ways``), the row and column there, and its proof (an index into ``proofs``; of layers that move
    alike the worst).
    """

    name: str
    note: str
    count: int
    tensors: list[str]
    ranks: list[int]
    before: list[list[list[int]]]
    after: list[list[list[int]]]
    matrix: list[list[int]]


class VariantView(TypedDict):
    """One plan."""

    grouping: str
    title: str
    summary: str
    num_ranks: int
    ranks: list[RankBytesView]
    """The first 32."""
    groups: list[str]
    """The rows and columns of the matrices: ranks, nodes or runs of ranks."""
    far: list[list[int]]
    """1 where two of them are on different nodes."""
    matrix: list[list[int]]
    measured: list[list[int]] | None
    links: list[list[Any]]
    """[way, planned bytes, measured bytes or ``None``]."""
    ladder: list[dict[str, Any]]
    parameters: list[ParameterView]
    moved: int
    redundant: int
    boxes: list[int] | None
    """How many boxes are proven, unproven and wrong; ``None`` of a plan."""
    wrong: list[str]
    """The first of the wrong boxes: where, from which rank to which, both fingerprints."""


class ReshardView(TypedDict):
    """All the picture needs; several variants are the same transition with ranks grouped in other ways."""

    picture: Literal["reshard"]
    title: str
    summary: str
    dtype_bytes: int
    by: str
    ways: list[str]
    proofs: list[str]
    variants: list[VariantView]


def reshard_view(*plans: ReshardPlan | ReshardReport) -> ReshardView:
    """Return the view of a plan, of a plan with its measurements, or of several plans to choose from.

    Raises:
        OptionError: nothing was given, something else, or plans for other numbers of ranks.
    """
    if not plans or not all(isinstance(plan_or_report, ReshardPlan | ReshardReport) for plan_or_report in plans):
        raise OptionError(f"a picture of a transition needs plans or reports, e.g. actor.reshard_plan; got {plans!r}")
    plan = _plan_of(plans[0])
    counts = {_plan_of(plan_or_report).num_ranks for plan_or_report in plans}
    if len(counts) > 1:
        raise OptionError(f"plans side by side need the same number of ranks; got {sorted(counts)}")
    variants = [_variant(plan_or_report) for plan_or_report in plans]
    node = len(set(plan.nodes)) > 1
    by = "rank" if plan.num_ranks <= MOST_RANKS else "node" if node and len(set(plan.nodes)) <= MOST_RANKS else "run of ranks"
    title = variants[0]["title"] if len(plans) == 1 else _both_title(plan, variants)
    view: ReshardView = {
        "picture": "reshard", "title": title, "summary": variants[0]["summary"], "dtype_bytes": DTYPE_BYTES[plan.dtype], "by": by,
        "ways": list(WAYS), "proofs": list(PROOFS), "variants": variants,
    }  # fmt: skip
    cleaned: ReshardView = plain(view)
    return cleaned


def _plan_of(plan_or_report: ReshardPlan | ReshardReport) -> ReshardPlan:
    return plan_or_report.plan if isinstance(plan_or_report, ReshardReport) else plan_or_report


def _both_title(plan: ReshardPlan, variants: Sequence[VariantView]) -> str:
    return f"{plan.spec}: '{plan.train}' to rollout '{plan.rollout}', grouped {' or '.join(v['grouping'] for v in variants)}"


def _variant(plan_or_report: ReshardPlan | ReshardReport) -> VariantView:
    plan, data = _plan_of(plan_or_report), plan_or_report.view()
    # a predicted report has the plan's bytes: nothing was measured
    report = plan_or_report if isinstance(plan_or_report, ReshardReport) and not plan_or_report.predicted else None
    bucket, groups = _buckets(plan)
    bars = data["ranks"][:BAR_RANKS]
    far = [[0] * len(groups) for _ in groups]
    nodes: dict[int, set[int]] = defaultdict(set)
    for rank, number in enumerate(bucket):
        nodes[number].add(plan.nodes[rank])
    for a in range(len(groups)):
        for b in range(len(groups)):
            far[a][b] = int(nodes[a].isdisjoint(nodes[b]))
    measured = None
    if report:
        rows = [[0] * plan.num_ranks for _ in range(plan.num_ranks)]
        for target, of_rank in enumerate(report.ranks):
            for source, count in enumerate(of_rank.received_from):
                rows[source][target] += count
            rows[target][target] = of_rank.bytes_copied + of_rank.bytes_shared
        measured = _together(rows, bucket, len(groups))
    measured_bytes = report.bytes_by_link() if report else {}
    links = [[way, count, measured_bytes[way][1] if report else None] for way, count in plan.bytes_by_link().items()]
    return {
        "grouping": plan.grouping, "title": data["title"], "summary": data["summary"], "groups": groups, "far": far,
        "num_ranks": plan.num_ranks, "ranks": [_rank(plan, report, number, row) for number, row in enumerate(bars)],
        "matrix": _together(data["matrix"], bucket, len(groups)), "measured": measured, "links": links, "ladder": data["ladder"],
        "parameters": _parameters(plan, bucket, len(groups), _Proofs(report)), "moved": plan.bytes_moved,
        "redundant": sum(rank["aside"] for rank in data["ranks"]),
        "boxes": list(report.boxes().values()) if report else None,
        "wrong": [str(box) for box in report.wrong[:MOST_WRONG]] if report else [],
    }  # fmt: skip


def _rank(plan: ReshardPlan, report: ReshardReport | None, number: int, row: Mapping[str, Any]) -> RankBytesView:
    own = report.ranks[number].bytes_copied + report.ranks[number].bytes_shared if report else None
    return {
        "row": number, "rank": number, "node": plan.nodes[number], "train": _at(plan.train_at(number)),
        "rollout": _at(plan.rollout_at(number)), "held": row["held"], "needed": row["needed"], "own": row["own"],
        "received": row["received"], "aside": row["aside"], "measured": row["measured"], "own_measured": own,
        "sources": row["from"], "boxes": _boxes_of_rank(report, number) if report else None,
    }  # fmt: skip


def _boxes_of_rank(report: ReshardReport, number: int) -> list[int]:
    proof = report.ranks[number].proof
    num_received = sum(section.count * sum(move.target == number for move in section.moves) for section in report.plan.sections)
    if proof is None:
        return [0, num_received, 0]
    return [proof.num_boxes - len(proof.wrong), num_received - proof.num_boxes, len(proof.wrong)]


class _Proofs:
    """The proofs of each box of a report, layers that move alike together."""

    def __init__(self, report: ReshardReport | None) -> None:
        self._proven = {rank for rank, result in enumerate(report.ranks) if result.proof is not None} if report else set()
        self._wrong = {(_of_any_layer(box.tensor), box.source, box.target, box.start) for box in (report.wrong if report else ())}

    def of(self, move: Move, start: Sequence[int]) -> int:
        """Return an index into ``PROOFS``."""
        if move.target not in self._proven:
            return UNPROVEN
        return WRONG if (_of_any_layer(move.tensor), move.source, move.target, tuple(start)) in self._wrong else PROVEN


def _of_any_layer(tensor: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.", tensor)


def _at(at: Coordinates | None) -> str:
    return "" if at is None else str(at)


def _buckets(plan: ReshardPlan) -> tuple[list[int], list[str]]:
    """Return the matrix row of every rank, and the rows' names."""
    count, nodes = plan.num_ranks, sorted(set(plan.nodes))
    if count <= MOST_RANKS:
        return list(range(count)), [f"rank {rank}" for rank in range(count)]
    if 1 < len(nodes) <= MOST_RANKS:
        return [nodes.index(node) for node in plan.nodes], [f"node {node}" for node in nodes]
    size = -(-count // MOST_RANKS)
    names = [f"ranks {first}-{min(first + size, count) - 1}" for first in range(0, count, size)]
    return [rank // size for rank in range(count)], names


def _together(matrix: Sequence[Sequence[int]], bucket: Sequence[int], count: int) -> list[list[int]]:
    summed = [[0] * count for _ in range(count)]
    for source, row in enumerate(matrix):
        for target, num_bytes in enumerate(row):
            if num_bytes:
                summed[bucket[source]][bucket[target]] += int(num_bytes)
    return summed


# ---- parameters


def _parameters(plan: ReshardPlan, bucket: Sequence[int], count: int, proofs: _Proofs) -> list[ParameterView]:
    """Return the two-dimensional parameters of the rollout: of the first layer, and those outside of layers."""
    parameters = []
    for section in _first_sections(plan):
        moves: dict[str, list[Move]] = defaultdict(list)
        for move in section.moves:
            if len(move.size) == 2:
                moves[move.source_local if plan.to_train else move.target_local].append(move)
        boxes_by_rank = _boxes_by_rank(plan, section)
        parameters += [
            _parameter(plan, section, name, those, boxes_by_rank, bucket, count, proofs) for name, those in moves.items()
        ]
    order = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"]
    return sorted(parameters, key=lambda p: order.index(_short(p["name"])) if _short(p["name"]) in order else len(order))


def _first_sections(plan: ReshardPlan) -> list[Section]:
    inside = [section for section in plan.sections if section.layers]
    return [*inside[:1], *(section for section in plan.sections if not section.layers)]


def _short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _boxes_by_rank(plan: ReshardPlan, section: Section) -> dict[int, list[Box]]:
    """Return the boxes every rank starts from, of one layer or of the tensors outside of layers."""
    by_place: dict[tuple[int, int], list[Box]] = {}
    by_rank = {}
    for rank in range(plan.num_ranks):
        at = plan.rollout_at(rank) if plan.to_train else plan.train_at(rank)
        if at is not None:
            if (at.pp, at.tp) not in by_place:
                by_place[at.pp, at.tp] = _boxes(plan, section, at)
            by_rank[rank] = by_place[at.pp, at.tp]
    return by_rank


def _boxes(plan: ReshardPlan, section: Section, at: Coordinates) -> list[Box]:
    spec, layout = plan.spec, plan.rollout if plan.to_train else plan.train
    if not section.layers:
        ends = vllm_ends if plan.to_train else megatron_ends
        return [box for part in ends(spec, layout, at.tp, at.pp) for box in part]
    layer = section.layers[0]
    stage, local = divmod(layer, spec.num_layers // layout.pp)
    if stage != at.pp:
        return []
    return vllm_layer(spec, layout.tp, at.tp, layer) if plan.to_train else megatron_layer(spec, layout.tp, at.tp, layer, local)


def _parameter(
    plan: ReshardPlan, section: Section, name: str, moves: Sequence[Move], boxes: Mapping[int, list[Box]], bucket: Sequence[int],
    count: int, proofs: _Proofs,
) -> ParameterView:  # fmt: skip
    tensors = sorted({move.tensor for move in moves}, key=lambda t: [m.tensor for m in moves].index(t))
    ranks = _shown(plan, moves, boxes)
    size = DTYPE_BYTES[plan.dtype]
    matrix = [[0] * count for _ in range(count)]
    for move in moves:
        matrix[bucket[move.source]][bucket[move.target]] += size * move.numel
    before = [[_box(b, tensors) for b in boxes.get(rank, ()) if b.tensor in tensors and len(b.size) == 2] for rank in ranks]
    after = []
    for rank in ranks:
        in_place = _in_place(plan, name, rank)
        incoming = sorted((move for move in moves if move.target == rank), key=lambda move: move.target_start)
        after.append([_piece(plan, move, boxes[move.source], tensors, in_place, proofs) for move in incoming])
    return {
        "name": name, "note": NOTES.get(_short(name), ""), "count": section.count, "tensors": [_label(t) for t in tensors],
        "ranks": ranks, "before": before, "after": after, "matrix": matrix,
    }  # fmt: skip


def _shown(plan: ReshardPlan, moves: Sequence[Move], boxes: Mapping[int, list[Box]]) -> list[int]:
    """Return the ranks to show: all, or half of them holders of the parameter and half of them not, where there are such."""
    if plan.num_ranks <= BOX_RANKS:
        return list(range(plan.num_ranks))
    tensors = {move.tensor for move in moves}
    have = [rank for rank in range(plan.num_ranks) if any(box.tensor in tensors for box in boxes.get(rank, ()))]
    lack = [rank for rank in range(plan.num_ranks) if rank not in set(have)]
    half = BOX_RANKS - min(len(lack), BOX_RANKS // 2)
    return sorted([*have[:half], *lack[: BOX_RANKS - min(half, len(have))]])


def _box(box: Box, tensors: Sequence[str]) -> list[int]:
    return [tensors.index(box.tensor), *box.start, *box.size, *box.local_start]


def _in_place(plan: ReshardPlan, name: str, rank: int) -> bool:
    """Whether both engines may use one storage for a parameter: the same boxes at the same places."""
    if plan.train_at(rank) is None or plan.rollout_at(rank) is None:
        return False
    return name in plan.shared(rank)


def _piece(
    plan: ReshardPlan, move: Move, boxes: Sequence[Box], tensors: Sequence[str], in_place: bool, proofs: _Proofs
) -> list[int]:
    box = next(
        b for b in boxes
        if b.local == move.source_local and b.tensor == move.tensor
        and all(lo <= s < lo + n for lo, s, n in zip(b.local_start, move.source_start, b.size, strict=True))
    )  # fmt: skip
    start = [b + s - lo for b, s, lo in zip(box.start, move.source_start, box.local_start, strict=True)]
    near = plan.nodes[move.source] == plan.nodes[move.target]
    way = (IN_PLACE if in_place else COPIED) if move.source == move.target else SAME_NODE if near else NETWORK
    return [
        tensors.index(move.tensor), *start, *move.size, *move.target_start, move.source, way, *move.source_start,
        proofs.of(move, start),
    ]  # fmt: skip


def _label(tensor: str) -> str:
    short = tensor.rpartition(".layers.")[2].partition(".")[2] or tensor
    name = short.removesuffix(".weight").rpartition(".")[2]
    return name.removesuffix("_proj")


class ReshardPicture(Picture):
    """A plan, with its measurements, or plans to choose from. ``ReshardPicture(reshard_view(plan))``."""

    name: ClassVar[str] = "reshard"

    def to_text(self) -> str:
        """Return the title and one line a rank."""
        lines = []
        for variant in self.view["variants"]:
            lines.append(f"{variant['title']} ({variant['grouping']})")
            for rank in variant["ranks"][:TEXT_RANKS]:
                measured = "" if rank["measured"] is None else f", measured {bytes_text(rank['measured'])}"
                lines.append(
                    f"rank {rank['rank']}: holds {bytes_text(rank['held'])}, needs {bytes_text(rank['needed'])}: "
                    f"{bytes_text(rank['own'])} its own, {bytes_text(rank['received'])} received{measured}"
                )
            if variant["num_ranks"] > TEXT_RANKS:
                lines.append(f"and {variant['num_ranks'] - TEXT_RANKS} more ranks")
            if variant["boxes"] is not None:
                counts = zip(variant["boxes"], self.view["proofs"], strict=True)
                lines.append("boxes: " + ", ".join(f"{count} {word}" for count, word in counts))
            lines += [f"wrong: {text}" for text in variant["wrong"]]
        return "\n".join(lines)


# -- a still picture of one parameter, box by box on every rank


class ParameterPicture(Picture):
    """One parameter on every rank: its rows, or columns where it is cut by these, in the trainer's order and the rollout's."""

    name: ClassVar[str] = "parameter"
    HEIGHT: ClassVar[int] = 220

    def to_text(self) -> str:
        """Return one line a rank."""
        lines = [self.view["title"]]
        for rank in self.view["ranks"]:
            before = " ".join(box["label"] for box in rank["before"]) or "-"
            after = " ".join(box["label"] + ("" if box["own"] else f"(from {box['source']})") for box in rank["after"]) or "-"
            lines.append(f"rank {rank['rank']}: {before}  ->  {after}")
        return "\n".join(lines)

    def to_html(self, full: bool = False) -> str:
        """Return the SVG as HTML; ``full`` for a whole page."""
        return html_page(self.view["title"], self.placeholder()) if full else self.placeholder()

    def to_svg(self) -> str:
        """Draw two columns a rank: before and after; parts from another rank are outlined in red and hatched."""
        self._hatch = Hatches()
        boxes = [box for rank in self.view["ranks"] for box in (*rank["before"], *rank["after"])]
        names, by_columns = sorted({box["tensor"] for box in boxes}), any(box["place"].startswith(":") for box in boxes)
        colors = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(names)}
        most = max(sum(box["rows"] for box in rank[side]) for rank in self.view["ranks"] for side in ("before", "after")) or 1
        parts = [svg_text(2, 16, self.view["title"], font_weight=600, font_size=13)]
        for i, name in enumerate(names):
            parts.append(tag("rect", x=4 + i * 150, y=28, width=10, height=10, fill=colors[name]))
            parts.append(svg_text(18 + i * 150, 37, name + (", columns" if by_columns else ""), class_="sub"))
        for i, rank in enumerate(self.view["ranks"]):
            x = 8 + i * 224
            parts.append(svg_text(x, 58, f"rank {rank['rank']}", font_weight=600))
            for column, side in enumerate(("before", "after")):
                left = x + column * 106
                parts.append(svg_text(left, 72, {"before": "trainer", "after": "rollout"}[side], class_="sub"))
                y = 78.0
                for box in rank[side]:
                    height = self.HEIGHT * box["rows"] / most
                    own = side == "before" or box["own"]
                    fill = colors[box["tensor"]] if own else self._hatch(colors[box["tensor"]])
                    label = box["place"].removeprefix(":, ") if by_columns else box["label"]  # what does not fit would be cut
                    words = label + ("" if own else f" from {box['source']}")
                    hint = tag("title", f"{box['tensor']} {box['place']}: {words}")
                    parts.append(tag(
                        "rect", hint, x=left, y=y, width=98, height=max(1.0, height - 1), fill=fill,
                        stroke=TRANSFER_COLOR if not own else None,
                    ))  # fmt: skip
                    if height >= 11:
                        ink = {"fill": ink_on(colors[box["tensor"]]), "class_": None} if own else {}
                        if not own:  # words on a hatch are hard to read
                            behind = {"x": left + 2, "y": y + height / 2 - 6, "width": len(words) * 5.1, "height": 11}
                            parts.append(tag("rect", **behind, class_="paper"))
                        parts.append(svg_text(left + 4, y + height / 2 + 4, words, font_size=9, **ink))
                    y += height
        width = 8 + len(self.view["ranks"]) * 224
        return svg_document(
            max(width, 420), 90 + self.HEIGHT, self.view["title"], self.view["summary"], self._hatch.defs() + "".join(parts)
        )
