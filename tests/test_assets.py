"""Models and data that need no hub."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import subprocess
import tarfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from expect import each, refuses

from hfsdk import data
from hfsdk.assets import MODELS, __main__, cache, model_folder, reviews, reviews_file, smollm2
from hfsdk.core.errors import ModelNotFoundError, OptionError

TEXTS = ["A film.", "naïve ’quotes’ – 日本 😀", " two  spaces, it 's\ttabs\nlines\r\n", "<eos> is text too?" * 3, ""]


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HFSDK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_folder("tiny"))


@pytest.fixture
def torch():
    """torch on one thread: on a busy machine small models are slower on two."""
    module = pytest.importorskip("torch")
    threads = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(threads)


# -- the cache --------------------------------------------------------------------------------------------------------


def make_download(content: bytes = b"content") -> cache.Download:
    total = hashlib.sha256(content).hexdigest()
    return cache.Download(requirement="some-package==1.0", file_name="some.whl", sha256=total)


def test_home_follows_the_environment(empty_home, monkeypatch):
    assert cache.home() == empty_home
    monkeypatch.delenv("HFSDK_HOME")
    assert cache.home().parts[-2:] == (".cache", "hfsdk")


@pytest.fixture
def pip(monkeypatch):
    """``pip(content, says)``: what pip does from now on; returns the list of what it is asked for, one line a call."""

    def replace(content=None, says=""):
        asked = []

        def run(command, **options):
            asked.append(Path(command[command.index("-r") + 1]).read_text().strip())
            if content is not None:
                Path(command[command.index("-d") + 1], "some.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, bool(says), "", says)

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    return replace


def test_fetch_asks_pip_once_and_by_the_files_hash(empty_home, pip):
    asked = pip(b"content")
    assert cache.fetch(make_download()).read_bytes() == b"content"
    assert cache.fetch(make_download()) == empty_home / "downloads" / "some.whl"
    assert asked == [f"some-package==1.0 --hash=sha256:{hashlib.sha256(b'content').hexdigest()}"]


def test_fetch_failure_says_what_to_do(empty_home, pip):
    pip(says="ERROR: no route to the index")
    with refuses(ModelNotFoundError, "no route to the index", "hfsdk.assets prepare", empty_home / "downloads" / "some.whl"):
        cache.fetch(make_download())


def test_fetch_refuses_another_file(empty_home, pip):
    there = empty_home / "downloads" / "some.whl"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"tampered")
    hashes = [hashlib.sha256(content).hexdigest() for content in (b"content", b"tampered")]
    with refuses(ModelNotFoundError, there, *hashes):
        cache.fetch(make_download())
    there.unlink()
    pip(b"tampered")
    with refuses(ModelNotFoundError, *hashes):
        cache.fetch(make_download())
    assert not there.exists()


def trojan(folder, canary):
    """Lay vaderSentiment's source package as a stranger would serve it; its set-up touches the canary."""
    setup = f"open({str(canary)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='vaderSentiment', version='3.3.2')\n"
    path = folder / reviews.SOURCE.file_name
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"setup.py": setup, "PKG-INFO": "Metadata-Version: 2.1\nName: vaderSentiment\nVersion: 3.3.2\n"}.items():
            info = tarfile.TarInfo(f"vaderSentiment-3.3.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("believed", [False, True], ids=["our hash", "the trojan's own"])
def test_a_source_package_of_another_hash_runs_nothing(empty_home, tmp_path, monkeypatch, believed):
    """Asked for with its own hash, the same package does run its set-up: the canary would be seen."""
    canary = tmp_path / "canary"
    path = trojan(tmp_path, canary)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if believed:
        cache.fetch(dataclasses.replace(reviews.SOURCE, sha256=cache.sha256(path)))
    else:
        with refuses(ModelNotFoundError, "vaderSentiment==3.3.2"):
            cache.fetch(reviews.SOURCE)
    assert canary.exists() == believed


@each(
    "there, can",
    [
        ({"setuptools": "78.1.1"}, True), ({"setuptools": "70.1"}, True), ({"setuptools": "65.5.0"}, False),
        ({"setuptools": "65.5.0", "wheel": "0.45"}, True), ({}, False),
    ],
)  # fmt: skip
def test_what_cannot_open_the_reviews_package_is_said(empty_home, monkeypatch, there, can):
    """A fresh environment of Python 3.11 has a setuptools that asks for the package wheel; one of 3.12 has none."""

    def version(name):
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    def fetch(source):
        raise ModelNotFoundError("it was asked for")

    monkeypatch.setattr(reviews, "version", version)
    monkeypatch.setattr(reviews, "find_spec", there.get)
    monkeypatch.setattr(reviews, "fetch", fetch)
    with refuses(ModelNotFoundError, "asked for" if can else "pip install 'setuptools>=70.1'"):
        reviews.reviews_file()


def test_atomic_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "target"
    with contextlib.suppress(RuntimeError), cache.atomic_folder(target) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with cache.atomic_folder(target) as folder:
        (folder / "file").write_text("first")
    with cache.atomic_folder(target) as folder:  # a second process was slower
        (folder / "file").write_text("second")
    assert (target / "file").read_text() == "first"
    assert list(target.parent.iterdir()) == [target]


def test_sums_notice_changes(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    assert cache.differing_files(tmp_path) == ["SHA256SUMS"]
    cache.record_sums(tmp_path)
    assert cache.differing_files(tmp_path) == []
    (tmp_path / "a").write_text("changed")
    (tmp_path / "b").unlink()
    assert cache.differing_files(tmp_path) == ["a", "b"]


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_and_folders(tmp_path):
    tiny = model_folder("tiny")
    assert (tiny / "config.json").is_file()
    assert model_folder(tiny) == model_folder(str(tiny)) == model_folder("Tiny") == tiny


@each(
    "files, lacks",
    [
        ([], "empty"),
        (["model.safetensors"], "no config.json"),
        (["config.json", "a"], "no *.safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "session.actor(model, lora="),
    ],
)
def test_an_incomplete_folder_is_told_what_it_lacks(tmp_path, files, lacks):
    folder = tmp_path / "-".join(["model", *files])
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    with refuses(ModelNotFoundError, folder, lacks):
        model_folder(folder)


@each("name", ["tinny", "no/such/folder", "./nowhere", ""])
def test_unknown_name_lists_what_exists(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with refuses(ModelNotFoundError, name, "smollm2-135m-instruct", "tiny"):
        model_folder(name)


def test_hub_id_without_a_network(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_, **__):
        raise hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with refuses(ModelNotFoundError, "cannot reach the hub", "'owner/model'", "tiny"):
        model_folder("owner/model")


def test_smollm2_without_what_converts_it(empty_home, monkeypatch):
    monkeypatch.setattr(smollm2, "NEEDS", ("json", "no_such_module"))
    with refuses(ModelNotFoundError, "no_such_module"):
        model_folder("smollm2-135m-instruct")


def test_command_line(empty_home, capsys):
    assert __main__.main(["list"]) == 0
    assert "not prepared yet" in capsys.readouterr().out
    assert __main__.main(["prepare", "tiny"]) == 0
    assert __main__.main(["verify", "tiny"]) == 0
    assert __main__.main(["verify"]) == 1
    output = capsys.readouterr()
    assert "as recorded" in output.out
    assert "prepare movie-reviews" in output.err
    with pytest.raises(SystemExit):
        __main__.main(["prepare", "nothing"])


# -- tiny -------------------------------------------------------------------------------------------------------------


def test_tiny_is_small_and_as_recorded():
    folder = MODELS["tiny"].place()
    assert cache.differing_files(folder) == []
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6


def test_tiny_shapes_suit_every_layout():
    config = json.loads((model_folder("tiny") / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert (heads, kv_heads, config["head_dim"], config["num_hidden_layers"]) == (8, 4, 32, 4)
    assert config["vocab_size"] % 64 == config["intermediate_size"] % 4 == 0
    assert len({config[f"{name}_token_id"] for name in ("pad", "bos", "eos")}) == 3


@each("text", TEXTS)
def test_tiny_tokens_are_bytes(tokenizer, text):
    plain = text.replace("<eos>", "< eos>")
    assert tokenizer.encode(plain) == list(plain.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiny_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.decode([72, 105, 258, 256, 300], skip_special_tokens=True) == "Hi"  # 300 means nothing
    assert tokenizer.decode(list("naïve".encode())[:3]) == "na\ufffd"  # half a character does not raise
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi\n"


def test_tiny_has_learnt_english(torch):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype=torch.float32)
    bits, count = 0.0, 0
    for text in list(data.movie_reviews("test")["text"])[:40]:
        ids = torch.tensor([[*text.encode(), 258]])
        with torch.inference_mode():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        bits -= log_probs.gather(1, ids[0, 1:, None]).sum().item() / 0.6931471805599453
        count += ids.shape[1] - 1
    assert bits / count < 2.0  # bits per character; uniform bytes would be 8


# -- smollm2 ----------------------------------------------------------------------------------------------------------


def test_smollm2_knows_the_capital_of_france(torch):
    if not smollm2.smollm2_place().is_dir():
        pytest.skip("smollm2-135m-instruct is not prepared: python -m hfsdk.assets prepare")
    transformers = pytest.importorskip("transformers")
    folder = model_folder("smollm2-135m-instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (9, 3, True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(reply[0, ids.shape[1] :])


# -- data -------------------------------------------------------------------------------------------------------------


def test_reviews():
    train, test, both = (data.movie_reviews(split) for split in ("train", "test", None))
    assert len(train) + len(test) == len(both) == 10_603
    assert 0.08 < len(test) / len(both) < 0.12
    assert list(both.features if hasattr(both, "features") else both.columns) == ["text", "rating", "id"]
    assert not set(train["text"]) & set(test["text"])
    assert all(-4 <= rating <= 4 for rating in both["rating"])
    assert train[0]["text"].startswith("The Rock is destined")
    assert cache.sha256(reviews_file()).startswith("c58ea0ec009ae430")  # the same table, and the same split, everywhere
    with refuses(OptionError, "validation"):
        data.movie_reviews("validation")


def test_reviews_without_datasets(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    table = data.movie_reviews("test")
    assert list(table.columns) == ["text", "rating", "id"]


def test_parsing_drops_doubles_and_bad_archives(tmp_path):
    rows = reviews.parse_reviews("1\t-0.5\tDull.\r\n2\t3.5\tBright.\r\n3\t1.0\tDull.\r\n\r\n")
    assert [(row["id"], row["rating"], row["text"]) for row in rows] == [(1, -0.5, "Dull."), (2, 3.5, "Bright.")]
    (tmp_path / "bad.tar.gz").write_bytes(b"not an archive")
    with refuses(ModelNotFoundError, tmp_path / "bad.tar.gz"):
        reviews.read_table(tmp_path / "bad.tar.gz")


def test_additions_are_right_and_repeat():
    table = data.additions(50, seed=3)
    assert list(data.additions(50, seed=3)["prompt"]) == list(table["prompt"]) != list(data.additions(50)["prompt"])
    for prompt, answer in zip(table["prompt"], table["answer"], strict=True):
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer)
    assert len(data.additions(0)) == 0
    with refuses(OptionError, "num=-1"):
        data.additions(-1)


@each(
    "completion, answer, right",
    [
        ("46\n", "46", True), (" 46", "46", True), ("\n46", "46", True), ("046.0 apples", "46", True), ("= +46!", "46", True),
        ("46\n47", "46", True), ("47\n46", "46", False), ("4 6", "46", False), ("46.5", "46", False), ("-46", "46", False),
        ("461", "46", False), ("4", "46", False), ("", "46", False), ("forty-six", "46", False), ("٤٦", "46", False),
        ("1,234,567", "1234567", True), ("1,2345", "1", True), ("12,34", "12", True), ("-.5", "-0.50", True),
        ("-0.50", -0.5, True), ("-0", 0, True), ("46", 46, True), ("46", np.int64(46), True), ("46", 46.0, True),
        ("1" + "0" * 20, 1e20, True), ("7" * 9000, "7" * 9000, True), ("7" * 9000, "7" * 8999, False),
    ],
)  # fmt: skip
def test_exact_match_reads_the_first_number(completion, answer, right):
    assert data.exact_match([completion], [answer]) == [float(right)]


def test_exact_match_needs_answers_that_are_numbers():
    assert data.exact_match(completions=["1", "2"], answer=["1", "3"], prompts=["0+1=", "1+1="]) == [1.0, 0.0]
    with refuses(OptionError, "answer 1", "'four'"):
        data.exact_match(["3", "4"], ["3", "four"])
    table = data.additions(200, seed=1)
    assert set(data.exact_match(table["answer"], table["answer"])) == {1.0}


def test_sentiment():
    pytest.importorskip("vaderSentiment")
    good, bad, neither = data.vader_sentiment(["A wonderful, moving film.", "A dull, awful mess.", "It is 5 pm."])
    assert good > 0.5 > 0 == neither > -0.5 > bad
