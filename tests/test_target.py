from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_kimi.errors import TargetError, UsageError
from eagle3_kimi.target import detect_preset, folder_digest, resolve_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A multimodal target as Kimi-K2.5 is laid out: text model under `text_config` and `language_model.`."""
    folder = tmp_path / "target"
    folder.mkdir()
    text = {"hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 6, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    tensors = {
        "language_model.model.embed_tokens.weight": torch.arange(24, dtype=torch.bfloat16).view(6, 4),
        "language_model.lm_head.weight": -torch.arange(24, dtype=torch.bfloat16).view(6, 4),
        "language_model.model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "vision_tower.encoder.norm.weight": torch.zeros(3),
    }
    first = dict(list(tensors.items())[:2])
    save_file(first, folder / "model-1.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in first}, folder / "model-2.safetensors")
    weight_map = {name: f"model-{1 if name in first else 2}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_sizes_come_from_the_text_config(folder: Path) -> None:
    target = resolve_target(folder)
    assert (target.hidden_size, target.num_layers, target.vocab_size, target.rms_norm_eps) == (4, 2, 6, 1e-5)


def test_tensors_are_read_by_suffix_in_their_own_dtype(folder: Path) -> None:
    target = resolve_target(folder)
    assert target.read_tensor("embed_tokens").tolist() == torch.arange(24.0).view(6, 4).tolist()
    assert target.read_tensor("lm_head", torch.tensor([4, 1, 4])).tolist() == [
        [-16.0, -17.0, -18.0, -19.0],
        [-4.0, -5.0, -6.0, -7.0],
        [-16.0, -17.0, -18.0, -19.0],
    ]
    assert target.read_tensor("embed_tokens", torch.tensor([], dtype=torch.long)).shape == (0, 4)
    assert target.read_tensor("final_norm").dtype == torch.bfloat16
    with pytest.raises(TargetError, match=r"one tensor named \.\.\.layers\.9\.x, found none"):
        target.read_named_tensor("layers.9.x")


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    target = resolve_target(folder)
    assert torch.equal(target.read_tensor("lm_head"), target.read_tensor("embed_tokens"))


def test_the_revision_of_a_folder_follows_its_content(folder: Path) -> None:
    before = folder_digest(folder)
    assert resolve_target(folder).revision == before == folder_digest(folder)
    (folder / "notes.txt").write_text("no part of the model")
    assert folder_digest(folder) == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert folder_digest(folder) != before


def test_a_folder_takes_no_revision_but_its_own(folder: Path) -> None:
    # Two folders under one revision would share a journal.
    with pytest.raises(UsageError, match="has no revision 'main'"):
        resolve_target(folder, revision="main")
    digest = folder_digest(folder)
    assert resolve_target(folder, revision=digest).revision == digest


def test_what_is_not_there_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve_target(tmp_path)
    with pytest.raises(UsageError, match="neither a folder nor in the local Hub cache"):
        resolve_target("nobody/no-such-model")
    with pytest.raises(TargetError, match="no tokenizer that can be loaded"):
        resolve_target(folder).load_tokenizer()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(TargetError, match=r"neither model\.safetensors nor its index"):
        resolve_target(folder).read_tensor("lm_head")


def test_a_tokenizer_with_code_of_its_own_needs_consent(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    with pytest.raises(TargetError, match="--trust-remote-code"):
        resolve_target(folder).load_tokenizer()


class Vocabulary:
    def __init__(self, *texts: str) -> None:
        self._ids = {text: index for index, text in enumerate(texts)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


@pytest.mark.parametrize(
    ("texts", "vocab_size", "preset"),
    [
        (["<|tool_calls_section_begin|>", "<think>"], 163840, "kimi-k2.5"),
        (["<|tool_calls_section_begin|>", "<think>"], 1024, "tiny-kimi"),
        (["<think>", "</think>", "<|im_end|>"], 151936, "qwen3"),
        (["<think>", "</think>", "<｜end▁of▁sentence｜>"], 129280, "deepseek-r1"),
        (["</s>"], 32000, "text-think"),
    ],
)
def test_the_preset_is_told_by_the_vocabulary(texts: list[str], vocab_size: int, preset: str) -> None:
    tokenizer: Any = Vocabulary(*texts)
    assert detect_preset(tokenizer, {"vocab_size": vocab_size}) == preset
