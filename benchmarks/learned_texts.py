"""The same rows learned by hfsdk and by TRL: their token ids, and the held-out loss after SFT and after DPO from it.

Targets:

a. rows: of every row of conversations and of texts, through ``session.demonstrations``, ``session.pairs`` and ``session.prompts``
   and through TRL's ``SFTTrainer``, ``DPOTrainer`` and ``GRPOTrainer``, the same token ids (share of rows: 1), for the chat
   templates of at least ten families around SmolLM2's tokenizer. Two differences are told and counted as neither: behind the
   token that ends an answer TRL learns what the template writes before the next turn (a line feed, or the end of a text) too; and
   where the last characters of a prompt and the first of an answer are one token, TRL leaves the prompt's out, and hfsdk keeps the
   prompt as generation gets it.
b. loss: SmolLM2-135M-instruct with a ``<bos>`` before every text and turns that end with two tokens, ``<|im_end|>`` and a line
   feed: 50 steps of SFT, then 50 of DPO from it, on the same rows in the same order. The held-out loss of both systems' models,
   judged by transformers alone, differs by at most 1 %, after SFT and after DPO.

TRL lives in an environment of its own (trl_environment.py). Two threads each, one system after the other.

    python benchmarks/learned_texts.py --check           some half an hour
    python benchmarks/learned_texts.py --only rows
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, Report, parser, say
from trl_environment import child_environment, trl_python

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.assets.folder_tokenizer import FolderTokenizer

TRL, THREADS = "trl==1.16.0", 2
STEPS, BATCH, HELD_OUT = 50, 8, 64
SFT_LR, DPO_LR, WITHIN = 2e-5, 5e-6, 0.01
WORDS = 40
"""Of a review that are learned."""
BOS = "<repo_name>"
"""A special token of SmolLM2's that its texts have not, in the place of ``<bos>``."""
VISION = "smolvlm"
"""A family whose template writes contents in parts alone; hfsdk refuses it, as texts would be left out."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def asked(config: dict[str, Any], what: str) -> Any:
    """Run TRL's side and return its reply."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [str(trl_python(TRL)), str(Path(__file__).with_name("trl_learned.py")), what, file.name, str(THREADS)]
        done = subprocess.run(command, env=child_environment(THREADS), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("reply "))[6:])


def with_bos(into: Path) -> Path:
    """Make SmolLM2's folder with a ``<bos>`` before every text, and a template that writes it."""
    shutil.copytree(model_folder("smollm2-135m-instruct"), into)
    tokenizer = json.loads((into / "tokenizer.json").read_text())
    bos = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == BOS)
    begin = [{"SpecialToken": {"id": BOS, "type_id": 0}}]
    one, two = ({"Sequence": {"id": name, "type_id": k}} for k, name in enumerate("AB"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [*begin, one], "pair": [*begin, one, two],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos], "tokens": [BOS]}},
    }  # fmt: skip
    (into / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = json.loads((into / "tokenizer_config.json").read_text())
    names = {key: value for key, value in names.items() if key != "chat_template"} | {"bos_token": BOS}
    (into / "tokenizer_config.json").write_text(json.dumps(names))
    (into / "chat_template.jinja").write_text(TEMPLATE)
    return into


def said(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": role, "content": text}]


def short(text: str) -> str:
    """Return the beginning of a review."""
    return " ".join(text.split()[:WORDS])


def rows_of(split: str, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return demonstrations and pairs as conversations: reviews that are asked for."""
    reviews = hf.data.movie_reviews(split)["text"]
    demonstrations = [
        {"prompt": said("user", f"Write a review of a film, number {i}."), "completion": said("assistant", short(text))}
        for i, text in enumerate(reviews[:count])
    ]
    table = hf.data.review_pairs(split, count)
    pairs = [
        {
            "prompt": said("user", f"Write a favourable review, number {i}."), "chosen": said("assistant", short(chosen)),
            "rejected": said("assistant", short(rejected)),
        }
        for i, (chosen, rejected) in enumerate(zip(table["chosen"], table["rejected"], strict=True))
    ]  # fmt: skip
    return demonstrations, pairs


def ids_of(session: Any, demonstrations: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what hfsdk makes of rows, in the form of TRL's reply."""
    one = session.demonstrations(demonstrations, batch_size=len(demonstrations), shuffle=False)[0]
    two = session.pairs(pairs, batch_size=len(pairs), shuffle=False)[0]
    ids = session.prompts([row["prompt"] for row in demonstrations], batch_size=len(demonstrations), shuffle=False)[0]
    prompts, responses = ([row.tolist() for row in two[name]] for name in ("prompt", "response"))
    return {
        "demonstrations": [(p.tolist(), r.tolist()) for p, r in zip(one["prompt"], one["response"], strict=True)],
        "pairs": list(zip(prompts[::2], responses[::2], responses[1::2], strict=True)),
        "prompts": [row.tolist() for row in ids["prompt"]],
    }  # fmt: skip


def compare_rows(report: Report) -> None:
    """Compare token ids, family by family."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tests.strangers.families import FAMILIES, folder_of

    demonstrations, pairs = rows_of("train", 12)
    demonstrations[3]["completion"] = said("assistant", "  Blue. \n")
    texts = [
        [{name: " " * (name != "prompt") + value[0]["content"] for name, value in row.items()} for row in rows]
        for rows in (demonstrations, pairs)
    ]
    kinds, others = ("equal", "with more behind the end", "a token across the boundary", "other"), []
    counts = dict.fromkeys(kinds, 0)
    with tempfile.TemporaryDirectory() as place:
        folders = {name: folder_of(Path(place) / name, name, "byte-level BPE") for name in FAMILIES if name != VISION}
        cases = [
            {"tokenizer": str(folder), "demonstrations": given[0], "pairs": given[1]}
            for folder in folders.values() for given in ((demonstrations, pairs), texts)
        ]  # fmt: skip
        theirs = asked({"model": str(model_folder("tiny")), "cases": cases}, "rows")
        say("TRL has made its rows")
        for case, reply in zip(cases, theirs, strict=True):
            with hf.Session.simulated("1x1 cpu") as session:
                session.actor(case["tokenizer"])
                ours = ids_of(session, case["demonstrations"], case["pairs"])
            decode = FolderTokenizer(case["tokenizer"]).decode
            for kind, found in ours.items():
                for k, (mine, yours) in enumerate(zip(found, reply[kind], strict=True)):
                    outcome = compared([mine] if kind == "prompts" else mine, [yours] if kind == "prompts" else yours, decode)
                    counts[outcome] += 1
                    if outcome == "other":
                        others.append((Path(case["tokenizer"]).name, kind, k, mine, yours))
    judged = counts["equal"] + counts["other"]
    report.add("rows with the same token ids", counts["equal"] / judged, f"of {judged}", at_least=1.0)
    for what in ("with more behind the end", "a token across the boundary"):
        report.add(f"rows {what}", counts[what])
    report.add("families", len(FAMILIES) - 1, at_least=10)
    report.details["rows"] = {"counts": counts, "others": others[:20]}


def compared(mine: Any, yours: Any, decode: Any) -> str:
    """Return how two rows of token ids, a prompt and what follows it, stand to each other."""
    (prompt, *sides), (other_prompt, *other_sides) = mine, yours
    if prompt != other_prompt:
        texts = [decode(prompt + side) for side in sides]
        others = [decode(other_prompt + side) for side in other_sides]
        reaches = prompt[: len(other_prompt)] == other_prompt and sides
        same = all(other.startswith(text) and not other[len(text) :].strip() for text, other in zip(texts, others, strict=True))
        return "a token across the boundary" if reaches and same else "other"
    behind = [other[len(side) :] if other[: len(side)] == side else None for side, other in zip(sides, other_sides, strict=True)]
    if any(rest is None or decode(rest, special=False).strip() for rest in behind):
        return "other"
    return "with more behind the end" if any(behind) else "equal"


def compare_losses(report: Report) -> None:
    """Train both, and judge their models."""
    demonstrations, pairs = rows_of("train", STEPS * BATCH)
    with tempfile.TemporaryDirectory() as place:
        folder = with_bos(Path(place) / "model")
        folders = {name: [f"{place}/{name}-sft", f"{place}/{name}-dpo"] for name in ("hfsdk", "TRL")}
        with hf.Session(devices=1) as session:
            actor = learner(session, folder, SFT_LR)
            held = ids_of(session, *rows_of("test", HELD_OUT))
            stream = session.demonstrations(demonstrations, batch_size=BATCH, shuffle=False)
            for step in range(STEPS):
                actor.update(stream[step], hf.CrossEntropy())
            actor.save_pretrained(folders["hfsdk"][0])
        with hf.Session(devices=1) as session:
            actor = learner(session, folders["hfsdk"][0], DPO_LR)
            session.reference(folders["hfsdk"][0])
            stream = session.pairs(pairs, batch_size=BATCH, shuffle=False)
            for step in range(STEPS):
                hf.DPO(beta=0.1).step(session.models, stream[step])
            actor.save_pretrained(folders["hfsdk"][1])
        say("hfsdk has learned")
        config = {"model": str(folder), "demonstrations": demonstrations, "pairs": pairs, "batch_size": BATCH, "steps": STEPS}
        sft, dpo = folders["TRL"]
        asked({**config, "lr": SFT_LR, "dpo_lr": DPO_LR, "sft": sft, "dpo": dpo}, "learn")
        say("TRL has learned")
        before = {"before": [str(folder), str(folder)]}
        judged = {"held_out": held["demonstrations"], "held_out_pairs": held["pairs"], "folders": {**before, **folders}}
        found = asked(judged, "judge")
    for kind, unit in (("sft", "nats a token"), ("dpo", "nats a pair")):
        for name, losses in found.items():
            report.add(f"held-out loss, {kind}, {name}", losses[kind], unit)
        report.add(f"difference, {kind}", abs(found["hfsdk"][kind] / found["TRL"][kind] - 1), "of TRL's", at_most=WITHIN)
    report.details["losses"] = found


def learner(session: Any, folder: str | Path, lr: float) -> Any:
    """Declare what learns."""
    return session.actor(str(folder), optimizer=hf.AdamW(lr=lr), rollout_options=hf.RolloutOptions(max_model_len=512))


def main() -> int:
    """Run what is asked for."""
    made = parser(__doc__)
    made.add_argument("--only", choices=("rows", "losses"), help="one of the two")
    arguments = made.parse_args()
    report = Report("learned texts beside TRL", f"two processes one after the other, {THREADS} threads each")
    if arguments.only != "losses":
        compare_rows(report)
    if arguments.only != "rows":
        compare_losses(report)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
