"""``FirstBad``: where a run's first bad number comes from: step, call, sample, token; of a weight the parameter, ranks, layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.core.field_texts import documented

if TYPE_CHECKING:
    import pandas as pd

KINDS: Mapping[str, str] = {
    "reward": "a score or cost",
    "generation": "a number of the generating engine",
    "log_probs": "a log-probability of a model whose weights are finite",
    "values": "a value of a model whose weights are finite",
    "advantage": "a reward per token, an advantage or a return",
    "column": "another column",
    "weight": "a weight",
    "loss": "what the loss function makes of finite inputs",
    "gradient": "a gradient, of a finite loss",
    "update": "an update as a whole: no sample of it stands out",
}
"""The kinds of a first bad number, each with its meaning."""


@documented
@dataclass(frozen=True, kw_only=True, eq=False)
class FirstBad:
    """The result of ``run.first_bad()``; in a notebook it draws itself. ``code`` is a cell that gets the same number again."""

    kind: str
    """One of `KINDS`: ``"reward"``, ``"generation"``, ``"log_probs"``, ``"values"``, ``"advantage"``, ``"column"``, ``"weight"``,
    ``"loss"``, ``"gradient"``, ``"update"``."""
    symptom: str
    """The sign by which it was noticed: a number of a step, or that the step failed."""
    step: int
    """The step in which it arose."""
    call: str
    """The call that made it, or the first that met it, e.g. ``"reward.compute_scores"``; ``""`` where none makes it."""
    role: str
    """The role whose call or weight that is."""
    column: str = ""
    """The column that has it; of a loss ``"token_loss"`` or ``"token_loss_gradient"``."""
    value: float | None = None
    """The number itself."""
    usual: float | None = None
    """How large such numbers were at most, where it is finite; ``None``: it is not."""
    epoch: int | None = None
    """Epoch of an update."""
    mini_batch: int | None = None
    """Mini-batch of an update, in its epoch: the optimizer step that met it first."""
    sample: int | None = None
    """Row of the step's batch."""
    token: int | None = None
    """Place in the sample's response; ``None`` where all of it is bad, or the number is not per token."""
    parameter: str = ""
    """The weight, or whose gradient it is, as ``rank.module.named_parameters()`` calls it."""
    ranks: tuple[int, ...] = ()
    """The ranks of the role that have it."""
    layer: str = ""
    """The module whose output first is not finite, or leaves the range it had before the step."""
    verdict: str = ""
    """All of it in a sentence or two."""
    text: str = ""
    """The sample, prompt and response, its token marked by ⟦ ⟧."""
    code: str = ""
    """A cell that gets the same number again: back to the snapshot, and the same steps, bit for bit."""
    snapshot: str = ""
    """The one that was gone back to."""
    left: str = ""
    """The place in the run where the session is now."""
    seconds: float = 0.0
    """Duration of the search."""
    rows: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The tokens around: see ``around``."""

    @property
    def around(self) -> pd.DataFrame:
        """The response's tokens around the token, one row each: position, token_id, token and every column per token."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def view(self) -> dict[str, Any]:
        """Return plain data for display."""
        places = {
            "step": self.step, "call": self.call, "epoch": self.epoch, "mini-batch": self.mini_batch, "sample": self.sample,
            "token": self.token, "column": self.column, "value": self.value, "usual": self.usual, "parameter": self.parameter,
            "ranks": ", ".join(map(str, self.ranks)), "layer": self.layer,
        }  # fmt: skip
        return {
            "kind": self.kind, "meaning": KINDS[self.kind], "symptom": self.symptom, "verdict": self.verdict,
            "places": {name: value for name, value in places.items() if value not in (None, "")}, "text": self.text,
            "code": self.code, "left": self.left, "seconds": self.seconds, "token": self.token,
            "rows": [dict(row) for row in self.rows],
        }  # fmt: skip

    def __repr__(self) -> str:
        lines = [f"FirstBad({self.kind}, {self.symptom}, {self.seconds:.1f} s)", f"  {self.verdict}"]
        if self.text:
            lines.append(f"  sample {self.sample}: {self.text!r}")
        return "\n".join([*lines, f"  {self.left}", *(f"    {line}" for line in self.code.splitlines())])
