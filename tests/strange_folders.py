"""Model folders as nobody should make them, opened in every way that needs no engine; run as a program it reports in JSON.

    python -m tests.strange_folders SEED

Each case is a whole folder with one file in another form. It is *loaded*, or *refused* by one line of an error of hfsdk's that
names the file; anything else is a *fault*, and so is an open of a file outside the folder, seen by an audit hook and, for
libraries that are not Python, by the kernel (inotify).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import shutil
import socket
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.assets.pretrained import load_config, load_tokenizer
from hfsdk.core.errors import HfsdkError
from hfsdk.core.lora import PEFT, AdapterSpec
from hfsdk.core.tokenizer_files import TOKENIZER
from hfsdk.core.weight_files import ADAPTER_WEIGHTS, WEIGHTS, WeightFiles
from hfsdk.engine.process.tasks import text_decoder
from tests.session.scripted import ScriptedRuntime

HANGS_S = 120
"""Longest time of one case: then it hangs, and the program ends with where."""
SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
INDEX = f"{WEIGHTS}.index.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
DEEP = b"[" * 100_000 + b"]" * 100_000
VALUES = [
    None, True, "", "x", "false", "1", "../../canary", "/etc/passwd", "a\0b", "\ud800", "x" * 100_000, -1, 0, 1.5, 2**31, 2**63,
    10**400, float("nan"), float("inf"), [], {}, [[]], [None], {"a": 1}, [-1], [2**70], "\x1b[2J",
]  # fmt: skip
"""What may stand in the place of any value."""


# -- folders


def tensors_bytes(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return a safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * _product(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    return header_bytes(header) + bytes(end)


def header_bytes(header: Any) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def make_folder(folder: Path, *, in_two: bool = False) -> Path:
    """Make a small model with a tokenizer; its adapters lie in ``adapters`` beside it."""
    folder.mkdir(parents=True)
    for file in model_folder("tiny").iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    (folder / SPECIAL).write_text(json.dumps({"eos_token": "<eos>"}))
    spec = hf.ModelSpec.from_folder(folder)
    shapes = spec.tensors()
    if in_two:
        names, files = list(shapes), ("model-1.safetensors", "model-2.safetensors")
        parts = dict(zip(files, (names[:4], names[4:]), strict=True))
        for file, part in parts.items():
            (folder / file).write_bytes(tensors_bytes({name: shapes[name] for name in part}))
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        (folder / WEIGHTS).write_bytes(tensors_bytes(shapes))
    lora = hf.LoRA(rank=2)
    adapters = AdapterSpec.of(spec, lora)
    beside = folder.with_name(f"{folder.name} adapters")
    beside.mkdir()
    (beside / ADAPTER_WEIGHTS).write_bytes(tensors_bytes({PEFT + name: shape for name, shape in adapters.tensors().items()}))
    (beside / "adapter_config.json").write_text(json.dumps(lora.peft_config(spec, str(folder))))
    return folder


# -- what may be wrong with a file


def kinds_of_file(canary: Path) -> dict[str, Callable[[Path], object]]:
    """Return what may stand in the place of a file, by name."""

    def a_socket(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as opened:
            here = os.getcwd()
            os.chdir(path.parent)  # an address is short
            opened.bind(path.name)
            os.chdir(here)

    found: dict[str, Callable[[Path], object]] = {
        "a pipe": lambda path: os.mkfifo(path),
        "a folder": lambda path: path.mkdir(),
        "a link to elsewhere": lambda path: path.symlink_to(canary),
        "a relative link to elsewhere": lambda path: path.symlink_to(os.path.relpath(canary, path.parent)),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to a folder": lambda path: path.symlink_to(canary.parent),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a socket": a_socket,
        "a sparse file without end": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    }
    if os.geteuid() == 0:
        found["a device"] = lambda path: os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))
    return found


def contents(whole: bytes) -> dict[str, bytes]:
    """Return contents that any file may have, by name."""
    return {
        "empty": b"", "half of it": whole[: len(whole) // 2], "a byte": b"\x04", "no UTF-8": b"\xff\xfe" + whole,
        "deep": DEEP, "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "a list": b"[]", "a number": b"5",
        "null": b"null", "a text": b'"x"', "twice": b'{"a": 1, "a": 2}', "an empty object": b"{}", "zeros": bytes(1000),
        "ninety deep": b"[" * 90 + b"]" * 90,
    }  # fmt: skip


def changed(rng: random.Random, value: Any) -> Any:
    """Return JSON with one value somewhere in it replaced, removed or doubled."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copied = rng.choice(keys), dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.15:
            del copied[key]
        else:
            copied[key] = changed(rng, copied[key])
        return copied
    return rng.choice(VALUES)


def headers(whole: bytes) -> dict[str, bytes]:
    """Return files of weights whose headers say what cannot be, by name."""
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    first, second = list(header)[:2]

    def of(**entry: Any) -> bytes:
        return header_bytes({**header, first: {**header[first], **entry}}) + data

    end = header[first]["data_offsets"][1]
    found = {
        f"offsets {offsets}": of(data_offsets=offsets)
        for offsets in (
            [-2, end], [2, end + 2], [0, 2**64], [0, 2**63], [2**64, 2**64 + end], [end, 0], [0, end + 2], [0], [], None, "x",
            [0.0, end], [True, end], [0, 10**30], header[second]["data_offsets"],
        )
    }  # fmt: skip
    found |= {
        f"shape {shape}": of(shape=shape)
        for shape in ([2**32, 2**32], [2**63, 2, 0], [-1], [10**30], [1], [1.5], ["1"], None, [[1]], [0], [2**62, 2**62, 0])
    }
    found |= {f"dtype {dtype}": of(dtype=dtype) for dtype in ("F7", "f32", "", None, 5, ["F32"], "I16", "F8_E4M3", "C64", "BOOL")}
    return found | {
        "no object": header_bytes([1]) + data, "no JSON": header_bytes(b"{") + data, "deep": header_bytes(DEEP) + data,
        "longer than the file": struct.pack("<Q", len(whole)) + whole[8:], "longest": struct.pack("<Q", 2**64 - 1) + whole[8:],
        "200 MB": struct.pack("<Q", 2 * 10**8) + whole[8:], "one byte short": whole[:-1], "one byte more": whole + b"\0",
        "none": header_bytes({}) + data, "nothing at all": header_bytes({}),
        "metadata of numbers": header_bytes({"__metadata__": {"a": 1}, **header}) + data,
        "metadata no object": header_bytes({"__metadata__": [], **header}) + data,
        "twice": header_bytes(json.dumps(header)[:-1].encode() + b"," + json.dumps({first: header[first]}).encode()[1:]) + data,
        "another's": header_bytes({**header, first: header[second]}) + data,
        "a hole": header_bytes({name: entry for name, entry in header.items() if name != second}) + data,
        "an odd name": header_bytes({**header, "\x1b[2J\n": {"dtype": "F32", "shape": [], "data_offsets": [end, end]}}) + data,
    }  # fmt: skip


def indices(whole: dict[str, Any], canary: Path, folder: Path) -> dict[str, Any]:
    """Return indices that lead elsewhere or nowhere, by name."""
    weight_map = whole["weight_map"]
    first = next(iter(weight_map))
    odd = [
        str(canary), os.path.relpath(canary, folder), "../" + canary.name, "model-1.safetensors/", "./model-1.safetensors", ".",
        "..", "", "sub/model.safetensors", "a\\model.safetensors", "a\0.safetensors", "tokenizer.json", "missing.safetensors", 5,
        None, [], {}, 1.5, "x" * 5000 + ".safetensors", "\x1b[2J.safetensors", "model-2.safetensors",
    ]  # fmt: skip
    found: dict[str, Any] = {f"names {name!r}"[:60]: {"weight_map": {**weight_map, first: name}} for name in odd}
    maps = [None, [], {}, "x", 5, list(weight_map), {5: "model-1.safetensors"}, {first: weight_map[first]}]
    return found | {f"weight_map {some!r}"[:60]: {"weight_map": some} for some in maps} | {"no weight_map": {"metadata": {}}}


def that_name_files(whole: dict[str, Any], canary: Path) -> dict[str, bytes]:
    """Return configurations of a tokenizer that would have transformers read a file from elsewhere, by name."""
    keys = ("vocab_file", "merges_file", "tokenizer_file", "added_tokens_file", "special_tokens_map_file", "chat_template_file")
    named = [{**dict.fromkeys(keys, str(canary)), "tokenizer_class": of} for of in CLASSES]
    named += [{"init_inputs": [str(canary)] * 3, "tokenizer_class": of} for of in CLASSES]
    named += [{"name_or_path": str(canary), "gguf_file": str(canary)}, {"chat_template": str(canary)}]
    named += [{"fast_tokenizer_files": [str(canary.with_name(OTHER))]}, {"fast_tokenizer_files": [f"../elsewhere/{OTHER}", 5]}]
    named += [{"chat_template": [{"name": "default", "template": "{% include " + repr(str(canary)) + " %}"}]}]
    return {f"with {one!r}"[:100]: json.dumps({**whole, **one}).encode() for one in named}


def of_its_kind(rng: random.Random, name: str, content: bytes) -> dict[str, bytes]:
    """Return contents that are nearly what a file of this name has, by name."""
    if name.endswith(".safetensors"):
        return headers(content) if content != b"{}" else {}
    if name.endswith(".json"):
        return {f"changed {number}": json.dumps(changed(rng, json.loads(content))).encode() for number in range(MUTATIONS)}
    return {f"template {template!r}"[:80]: template.encode() for template in TEMPLATES}


def cases(rng: random.Random, root: Path, canary: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (what, the file's name, folder) of every case, each made as it is asked for."""
    plain, cut = make_folder(root / "plain"), make_folder(root / "cut", in_two=True)
    beside = plain.with_name("plain adapters")

    def put(whole: Path, name: str, make: Callable[[Path], object], what: str) -> tuple[str, str, Path]:
        folder = root / "case" / whole.name
        shutil.rmtree(root / "case", ignore_errors=True)
        for one in (plain, cut, beside):
            (root / "case" / one.name).mkdir(parents=True)
            for file in one.iterdir():
                os.link(file, root / "case" / one.name / file.name)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        return f"{name} is {what}", name, folder

    def written(content: bytes) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(content)

    def alone(content: bytes) -> Callable[[Path], object]:
        return lambda path: (path.write_bytes(content), (path.parent / TOKENIZER).unlink())

    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", SPECIAL, TEMPLATE, WEIGHTS]
    files = [(plain, name) for name in [*names, "beside.safetensors", "added_tokens.json"]]
    files += [(cut, INDEX), (cut, "model-2.safetensors"), (beside, "adapter_config.json"), (beside, ADAPTER_WEIGHTS)]
    for whole, name in files:
        content = (whole / name).read_bytes() if (whole / name).exists() else b"{}"
        for what, make in kinds_of_file(canary).items():
            yield put(whole, name, make, what)
        for what, odd in {**contents(content), **of_its_kind(rng, name, content)}.items():
            yield put(whole, name, written(odd), what)
    config = json.loads((plain / "config.json").read_text())
    for odd_name in (str(canary.with_name("config.4.0.0.json")), "../../elsewhere/config.4.0.0.json"):
        content = json.dumps({**config, "configuration_files": [odd_name]}).encode()
        yield put(plain, "config.json", written(content), "with the name of another")
    for what, odd in that_name_files(json.loads((plain / "tokenizer_config.json").read_text()), canary).items():
        yield put(plain, "tokenizer_config.json", written(odd), what)
        yield put(plain, "tokenizer_config.json", alone(odd), f"alone {what}")
    for what, odd_index in indices(json.loads((cut / INDEX).read_text()), canary, root / "case" / "cut").items():
        yield put(cut, INDEX, written(json.dumps(odd_index).encode()), what)


MUTATIONS = 15
OTHER = "tokenizer.4.0.0.json"
"""Another name of the canary, by which transformers looks for tokenizers of its older versions."""
CLASSES = (
    "TokenizersBackend",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "BertTokenizer",
    "T5Tokenizer",
    "ByT5Tokenizer",
)
TEMPLATES = (
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "{{ 1 / 0 }}", "{{ nothing.at_all }}",
    "{% if", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}",
    "\x1b[2J",
)  # fmt: skip


# -- opening


def readings(session: hf.Session, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the ways in which a folder is opened, by name."""
    model = folder.with_name("plain") if folder.name.endswith("adapters") else folder
    adapters = folder if folder.name.endswith("adapters") else None

    def declare(kind: str, **options: Any) -> None:
        handle = getattr(session, kind)(str(model), name="one", **options)
        if kind == "reward":
            assert len(handle.normalisation) == 2
        handle.release()

    def numbers(place: Path, name: str) -> None:
        from safetensors import safe_open

        with WeightFiles(place, name) as files:
            for file in sorted(set(files.files.values())):
                with safe_open(files.path(file), framework="np") as opened:
                    for tensor in files.header(file):
                        opened.get_slice(tensor).get_shape()

    if adapters is not None:
        return {
            "actor": lambda: declare("actor", lora=str(adapters), optimizer=hf.AdamW()),
            "weights": lambda: numbers(adapters, ADAPTER_WEIGHTS),
        }
    return {
        "actor": lambda: declare("actor"),
        "reward": lambda: declare("reward"),
        "weights": lambda: numbers(folder, WEIGHTS),
        "config": lambda: load_config(folder),
        "tokenizer": lambda: load_tokenizer(folder),
        "texts": lambda: FolderTokenizer(folder).decode(FolderTokenizer(folder).encode("a film")),
        "chat": lambda: FolderTokenizer(folder).encode_chat([{"role": "user", "content": "a film"}]),
        "task": lambda: text_decoder(str(folder))([1, 2]),
    }


READERS = {
    "config.json": ("actor", "reward", "config"), "generation_config.json": ("actor",), WEIGHTS: ("actor", "weights"),
    INDEX: ("actor", "weights"), "model-2.safetensors": ("actor", "weights"), "tokenizer.json": ("texts", "task", "tokenizer"),
    TEMPLATE: ("chat",), "beside.safetensors": ("actor", "weights"),
}  # fmt: skip
"""Who reads a file, where not all that there are are tried."""


NAMED = {INDEX: ("model-1.safetensors", "model-2.safetensors"), TEMPLATE: ("chat template", "tokenizer*")}
NAMED |= dict.fromkeys((SPECIAL, "tokenizer.json", "tokenizer_config.json", "added_tokens.json"), ("tokenizer", "chat template"))
"""What names a file as well: a library that read several does not say which was wrong."""


class Watch:
    """Sees what is opened outside a folder."""

    def __init__(self, canary: Path) -> None:
        self.opened: list[str] = []
        self._canary = canary
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK) if hasattr(libc, "inotify_init1") else -1
        if self._events >= 0:
            libc.inotify_add_watch(self._events, os.fsencode(canary), 0x20 | 0x1)  # IN_OPEN, IN_ACCESS
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if self._canary.name in path or self._canary.parent.name in path or path in ("/etc/passwd", "/dev/zero"):
                self.opened.append(path)

    def seen(self) -> list[str]:
        """Return what was opened since it was asked last."""
        found, self.opened = self.opened, []
        if self._events >= 0:
            with contextlib.suppress(BlockingIOError):
                found += ["inotify"] * bool(os.read(self._events, 4096))
        return found


def main(seed: int) -> dict[str, Any]:
    """Try every case and return what came of it."""
    warnings.simplefilter("ignore")
    rng, report = random.Random(seed), {"loaded": 0, "refused": 0, "faults": [], "watched": 0}
    with tempfile.TemporaryDirectory(prefix="strange-folders-") as place, hf.Session(runtime=ScriptedRuntime()) as session:
        canary = Path(place, "elsewhere", "canary.safetensors")
        canary.parent.mkdir()
        root = Path(place, "folders")
        canary.write_bytes(tensors_bytes({"model.norm.weight": (64,)}))
        for other in (OTHER, "config.4.0.0.json"):
            os.link(canary, canary.with_name(other))
        watch = Watch(canary)
        canary.read_bytes()
        report["watched"] = len(watch.seen())
        for what, name, folder in cases(rng, root, canary):
            ways = readings(session, folder)
            for way in [way for way in READERS.get(name, ways) if way in ways]:
                faulthandler.dump_traceback_later(HANGS_S, exit=True)
                fault = ""
                try:
                    ways[way]()
                    report["loaded"] += 1
                except HfsdkError as error:
                    report["refused"] += 1
                    text = str(error)
                    named = [name, *NAMED.get(name, ())]
                    if not any(one in text for one in named) or not text.isprintable():
                        fault = f"{type(error).__name__} names none of {named} in a line: {text!r}"
                except BaseException as error:
                    fault = f"{type(error).__name__}: {error!s:.200}"
                opened = watch.seen()
                if fault or opened:
                    report["faults"].append(f"{what}, {way}: {fault}{f' opened {opened}' if opened else ''}")
        faulthandler.cancel_dump_traceback_later()
    return report


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
