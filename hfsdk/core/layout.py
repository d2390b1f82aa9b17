"""How one model is spread over the ranks of a pool: ``Layout`` and the rank <-> coordinate arithmetic.

Rank order is Megatron's default ``tp-dp-pp``: tp varies fastest, then dp, then pp::

    Layout(tp=2, pp=2, dp=2)   rank = pp_rank * (dp * tp) + dp_rank * tp + tp_rank
        rank       0  1  2  3  4  5  6  7
        tp_rank    0  1  0  1  0  1  0  1
        dp_rank    0  0  1  1  0  0  1  1
        pp_rank    0  0  0  0  1  1  1  1

For planning and simulation there are two more. In a mixture of experts ``ep`` neighbouring data-parallel ranks may share the
experts of a layer: of *E* each has *E / ep*; all else of the model, and the samples, are spread as without it. ``cp`` ranks,
between tp and dp, may share each sequence: all have the same weights and samples, each computes its part of the tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from hfsdk.core.checks import Length, NamedFields, OneOf, Within, check_fields, checked, shown
from hfsdk.core.cluster import MOST_DEVICES
from hfsdk.core.errors import LayoutError
from hfsdk.core.field_texts import documented
from hfsdk.core.spec import ModelSpec

_AXIS = re.compile(r"^(tp|pp|dp|ep|cp)([0-9]{1,9})$")

Size = Annotated[int, Within(1, MOST_DEVICES)]
"""The size of an axis, or of a whole layout."""

Rank = Annotated[int, Within(0, MOST_DEVICES)]


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank in a layout."""

    tp: int
    pp: int
    dp: int
    cp: int = 0

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}" + f" cp{self.cp}" * bool(self.cp)


@documented
@dataclass(frozen=True, kw_only=True)
class Layout(NamedFields):
    """Tensor, pipeline and data parallel sizes. Prints and parses as ``"tp2 pp1 dp2"``, in simulation ``"tp2 pp1 dp8 ep8 cp2"``.

    ``dp=None`` means "fill up": :meth:`fill` sets it from the number of devices.
    """

    tp: Size = 1
    """Tensor parallel size: ranks that share each layer's matrices; divides the heads (docs/glossary.md)."""
    pp: Size = 1
    """Pipeline parallel size: stages that share the layers."""
    dp: Size | None = None
    """Data parallel size: replicas that share the samples; ``None`` fills up."""
    ep: Size = 1
    """Expert parallel size: neighbouring replicas that share a layer's experts; divides dp and the experts (mixtures only)."""
    cp: Size = 1
    """Context parallel size: ranks that share each sequence, in addition to those of tp (docs/perf-model.md)."""

    def __post_init__(self) -> None:
        check_fields(self, LayoutError)
        if self.dp is not None and self.dp % self.ep:
            raise LayoutError(f"layout '{self}' has ep={self.ep}, which must divide dp={self.dp}: replicas share experts.")

    @classmethod
    @checked(error=LayoutError)
    def parse(cls, text: Annotated[str, Length(0, 1000)] | Layout) -> Layout:
        """Parse ``"tp2 pp1 dp2"``; missing axes are 1, a missing dp fills up.

        Raises:
            LayoutError: a word is not an axis with a number, or an axis stands twice.
        """
        if isinstance(text, Layout):
            return text
        sizes: dict[str, int] = {}
        for word in text.split():
            match = _AXIS.match(word)
            if not match or match[1] in sizes:
                raise LayoutError(f"layout {shown(text)} does not parse at {shown(word)}; write e.g. 'tp2', 'dp2' or 'tp2 pp1 dp2'")
            sizes[match[1]] = int(match[2])
        if not sizes:
            raise LayoutError("an empty layout; write e.g. 'tp2', 'dp2' or 'tp2 pp1 dp2'")
        return cls(**sizes)

    @checked(error=LayoutError)
    def fill(self, num_devices: Size) -> Layout:
        """Return the layout with dp set so that it covers ``num_devices`` devices.

        Raises:
            LayoutError: tp x pp x cp (x dp) does not give ``num_devices``.
        """
        model_parallel = self.tp * self.pp * self.cp
        if self.dp is None and num_devices % (model_parallel * self.ep) == 0:
            return replace(self, dp=num_devices // model_parallel)
        if self.dp is None or model_parallel * self.dp != num_devices:
            raise LayoutError(
                f"layout '{self}' needs {'a multiple of ' if self.dp is None else ''}"
                f"{model_parallel * (self.dp or self.ep)} devices; the pool has {num_devices}. "
                "Change the layout or the number of devices."
            )
        return self

    @property
    def size(self) -> int:
        """Number of ranks (dp counted as small as can be where it is still open)."""
        return self.tp * self.pp * self.cp * (self.dp or self.ep)

    @property
    def num_replicas(self) -> int:
        """Data-parallel size: parts that samples are split into; the layout must be filled."""
        if self.dp is None:
            raise LayoutError(f"layout '{self}' has no dp yet; call fill(num_devices) first")
        return self.dp

    @property
    def num_copies(self) -> int:
        """Ranks with the same weights (experts aside), over which gradients are summed: dp x cp; the layout must be filled."""
        return self.num_replicas * self.cp

    @property
    def of_weights(self) -> Layout:
        """The layout as weights see it, in which ranks that share a sequence are copies like all others."""
        return self if self.cp == 1 else replace(self, dp=self.num_copies, cp=1)

    @checked(error=LayoutError)
    def coordinates(self, rank: Rank) -> Coordinates:
        """Return the position of ``rank`` (see the module's drawing)."""
        copy, dp = rank // self.tp, self.num_replicas
        return Coordinates(tp=rank % self.tp, cp=copy % self.cp, dp=copy // self.cp % dp, pp=copy // (self.cp * dp))

    @checked(error=LayoutError)
    def rank(self, *, tp: Rank = 0, pp: Rank = 0, dp: Rank = 0, cp: Rank = 0) -> int:
        """Return the rank at a position; inverse of :meth:`coordinates`."""
        return ((pp * self.num_replicas + dp) * self.cp + cp) * self.tp + tp

    @checked(error=LayoutError)
    def check_model(self, spec: ModelSpec) -> None:
        """Check that the model's sizes divide by this layout.

        Raises:
            LayoutError: tp fits neither heads, kv heads nor MLP, pp does not divide the layers, or ep the experts.
        """
        tp, kv = self.tp, spec.num_kv_heads
        if not _tp_fits(spec, tp):
            kv_words = f"divide, or be a multiple of, the kv heads ({kv})"
            fitting = [n for n in range(1, spec.num_heads + 1) if _tp_fits(spec, n)]
            raise LayoutError(
                f"{spec.name} has {spec.num_heads} attention heads, {kv} kv heads and an MLP of {spec.mlp_hidden_size}; "
                f"tp must divide the heads and the MLP and {kv_words}: {', '.join(map(str, fitting))}; got tp={tp}."
            )
        if spec.num_layers % self.pp:
            raise LayoutError(f"{spec.name} has {spec.num_layers} layers; pp must divide them; got pp={self.pp}.")
        if self.ep > 1 and spec.experts is None:
            raise LayoutError(f"{spec.name} has no experts to share; leave ep={self.ep} out of '{self}'.")
        if spec.experts is not None and spec.experts.count % self.ep:
            raise LayoutError(f"{spec.name} has {spec.experts.count} experts a layer; ep must divide them; got ep={self.ep}.")

    def __str__(self) -> str:
        axes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp}
        return " ".join(
            f"{axis}{size}" for axis, size in axes.items() if size is not None and (size > 1 or axis not in ("ep", "cp"))
        )

    @checked(error=LayoutError)
    def mesh(self, rollout_tp: Size = 1) -> Mesh:
        """Return who stands where, with the tp axis permuted for a rollout of ``rollout_tp`` (see :class:`Mesh`)."""
        return Mesh(layout=self, rollout_tp=rollout_tp)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a filled layout with their coordinates.

    vLLM's tensor-parallel groups are contiguous ranks. HybridFlow (section 5.3) wants the generation groups strided, so
    that a rank's training shard lies inside its rollout shard; since vLLM cannot be told, the *training* tp axis is
    permuted instead whenever ``1 < rollout_tp < tp`` and rollout_tp divides tp::

        tp=4, rollout_tp=2      rank             0    1    2    3
                                rollout tp rank  0    1    0    1
                                training tp rank 0    2    1    3     (rollout half 0 holds quarters 0 and 1)
    """

    layout: Layout
    rollout_tp: Size = 1

    def __post_init__(self) -> None:
        check_fields(self, LayoutError)

    def __str__(self) -> str:
        """Return the layout and, where ranks are permuted, for which rollout: meshes of one text have the same coordinates."""
        return f"{self.layout} for rollout tp{self.rollout_tp}" if self._permuted else str(self.layout)

    @property
    def _permuted(self) -> bool:
        return 1 < self.rollout_tp < self.layout.tp and self.layout.tp % self.rollout_tp == 0

    @checked(error=LayoutError)
    def coordinates(self, rank: Rank) -> Coordinates:
        """Return the position of ``rank``."""
        at = self.layout.coordinates(rank)
        if not self._permuted:
            return at
        # Neighbouring quarters go to the ranks of one rollout shard (the drawing above).
        ratio = self.layout.tp // self.rollout_tp
        return replace(at, tp=at.tp % self.rollout_tp * ratio + at.tp // self.rollout_tp)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.layout.size)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return the number of every rank's data-parallel replica."""
        return _replicas(self.layout)  # which the permutation of the tp axis leaves as they are

    @checked(error=LayoutError)
    def groups(self, axis: Annotated[str, OneOf("tp", "pp", "dp")]) -> list[list[int]]:
        """Return the rank groups along ``axis`` ("tp", "pp" or "dp"), each in the order of that axis; "dp" is of all copies."""
        by_place: dict[tuple[int, ...], list[int]] = {}
        others = [other for other in ("tp", "pp", "dp", "cp") if other != axis and (axis, other) != ("dp", "cp")]
        for rank in self.ranks:
            at = self.coordinates(rank)
            by_place.setdefault(tuple(getattr(at, other) for other in others), []).append(rank)
        return [sorted(group, key=lambda r: getattr(self.coordinates(r), axis)) for group in by_place.values()]


@lru_cache(maxsize=256)
def _replicas(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.coordinates(rank).dp for rank in range(layout.size))


def _tp_fits(spec: ModelSpec, tp: int) -> bool:
    kv = spec.num_kv_heads
    fused_rows = (spec.num_heads + 2 * kv) * spec.head_dim  # of Megatron's qkv, cut by rows where tp exceeds the kv heads
    width = spec.mlp_hidden_size if spec.experts is None else math.gcd(spec.mlp_hidden_size, spec.experts.width)
    return not (spec.num_heads % tp or width % tp or fused_rows % tp) and (kv % tp == 0 or tp % kv == 0)
