"""Whatever call a text of hfsdk's names, in a message or a docstring, is one that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hfsdk as hf
from hfsdk.models import ActorModel, CostModel, CriticModel, ReferenceModel, RewardModel

PACKAGE = Path(hf.__file__).parent
OWNERS = {
    "session": hf.Session, "actor": ActorModel, "critic": CriticModel, "reference": ReferenceModel, "reward": RewardModel,
    "cost": CostModel, "batch": hf.Batch, "run": hf.Run, "plan": hf.Plan, "hf": hf,
}  # fmt: skip
CALL = re.compile(r"(?<![\w.`/])(" + "|".join(OWNERS) + r")\.([A-Za-z]\w*)\(")


def texts_of(path: Path) -> list[tuple[int, str]]:
    return [
        (node.lineno, node.value) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # fmt: skip


def test_calls_that_texts_name_exist() -> None:
    found, missing = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in texts_of(path):
            for owner, name in CALL.findall(text):
                found += 1
                if not hasattr(OWNERS[owner], name):
                    missing.append(f"{path.relative_to(PACKAGE)}:{line}: {owner}.{name}(")
    assert found > 200
    assert not missing, "\n".join(missing)
