"""Train `tiny`, the byte-level model that ships with hfsdk, from nothing, on one CPU thread, seeded.

    python scripts/train_tiny.py                       # about thirteen minutes; writes hfsdk/assets/tiny
    python scripts/train_tiny.py --steps 20 --out out/tiny

Data: the train split of `hfsdk.data.movie_reviews` and a share of additions, "12+34=46\\n". Every text ends with eos.
Weights are rounded to bfloat16 when saved, so that every engine reads the same numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hfsdk import data
from hfsdk.assets.cache import record_sums

PAD, BOS, EOS = 256, 257, 258
VOCAB_SIZE = 320  # 259 are used; a multiple of 64, so that trainer and rollout pad it alike for tp 1, 2, 4, ...
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes are ids: byte-level BPE without merges, over the printable stand-ins that byte-level tokenizers use."""
    vocab = {char: byte for byte, char in enumerate(byte_to_char())}
    specials = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **specials}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )


def byte_to_char() -> list[str]:
    """Return the 256 characters that stand for the bytes (GPT-2's table: printable bytes stand for themselves)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = 0.02 if "embed" in name or "lm_head" in name else parameter.shape[1] ** -0.5
            scale /= math.sqrt(2 * config.num_hidden_layers) if "o_proj" in name or "down_proj" in name else 1.0
            torch.nn.init.normal_(parameter, std=scale)
    return model


def rows(texts: list[str], batch_size: int, length: int, addition_share: float, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches [batch_size, length + 1]; each row starts with the start of a text and is packed full."""
    generator = random.Random(seed)
    order: list[str] = []
    while True:
        batch = []
        for _ in range(batch_size):
            row: list[int] = []
            additions_only = generator.random() < addition_share
            while len(row) <= length:
                if additions_only:
                    a, b = generator.randint(0, 99), generator.randint(0, 99)
                    text = f"{a}+{b}={a + b}\n"
                else:
                    if not order:
                        order = generator.sample(texts, len(texts))
                    text = order.pop()
                row += [*text.encode(), EOS]
            batch.append(row[: length + 1])
        yield torch.tensor(batch)


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(model: LlamaForCausalLM, args: argparse.Namespace) -> float:
    """Train for ``args.steps``; return the bits per character on reviews of the test split."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / 50, 1 - step / args.steps)) for o in optimizers]
    batches = rows(data.movie_reviews("train")["text"][:], args.batch_size, args.length, args.addition_share, args.seed)
    start = time.process_time()
    for step in range(args.steps):
        loss = loss_of(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            bits, cpu_s = loss.item() / math.log(2), time.process_time() - start
            print(f"step {step:5d}  loss {bits:.3f} bits  {cpu_s:.0f} s of CPU time", flush=True)
    return bits_per_char(model)


@torch.inference_mode()
def bits_per_char(model: LlamaForCausalLM) -> float:
    """Return bits per character over the test split; eos counts as a character, a text is read on its own."""
    total, count = 0.0, 0
    for text in data.movie_reviews("test")["text"][:]:
        ids = torch.tensor([[*text.encode(), EOS]])
        total += loss_of(model, ids).item() * (ids.shape[1] - 1) / math.log(2)
        count += ids.shape[1] - 1
    return total / count


@torch.inference_mode()
def addition_accuracy(model: LlamaForCausalLM, num: int = 200) -> float:
    """Return the share of additions that greedy decoding gets right."""
    right = 0
    for prompt, answer in zip(*(data.additions(num, seed=1)[name][:] for name in ("prompt", "answer")), strict=True):
        ids = model.generate(torch.tensor([[*prompt.encode()]]), max_new_tokens=5, do_sample=False)
        right += bytes(i for i in ids[0, len(prompt) :].tolist() if i < 256).decode(errors="replace") == f"{answer}\n"
    return right / num


def save(model: LlamaForCausalLM, folder: Path, facts: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)
    record_sums(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--addition-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "hfsdk" / "assets" / "tiny")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model()
    start = time.process_time()
    bits = train(model, args)
    cpu_s = time.process_time() - start
    model.to(torch.bfloat16).float()  # measure what is saved
    facts: dict[str, object] = {k: v for k, v in vars(args).items() if k != "out"}
    facts |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "test_bits_per_char": round(bits, 3),
        "addition_accuracy_greedy": addition_accuracy(model),
        "cpu_s": round(cpu_s),
    }
    save(model, args.out, facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
