"""Naming, opening and reading the target model without loading it.

A target is a folder with `config.json`, a tokenizer and safetensors weights. It is named by a path,
by a Hub name already in the local cache (nothing is downloaded unless asked), or by `tiny`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_kimi.errors import TargetError, UsageError
from eagle3_kimi.protocol import PRESETS, ReasoningProtocol

if TYPE_CHECKING:
    import torch

TINY = "tiny"
"""`--target tiny` names the tiny Kimi target in every command."""

_TENSOR_SUFFIXES = {
    "embed_tokens": "model.embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "final_norm": "model.norm.weight",
}


@dataclass(frozen=True)
class Target:
    """A target model on disk. `path` is its folder, `revision` the Hub commit or a digest of its files."""

    name: str
    path: Path
    revision: str
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """The text model's configuration: `text_config` where there is one (Kimi-K2.5), else the top level."""
        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return dict(config.get("text_config") or config)

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        """From the config: `len(tokenizer)` can be wrong."""
        return int(self.config["vocab_size"])

    @property
    def rms_norm_eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))

    def load_tokenizer(self) -> Any:
        """The target's tokenizer; its own code runs only under `--trust-remote-code`."""
        from transformers import AutoTokenizer

        config = self.path / "tokenizer_config.json"
        auto_map = json.loads(config.read_text(encoding="utf-8")).get("auto_map") if config.is_file() else None
        if auto_map and not self.trust_remote_code and not (self.path / "tokenizer.json").is_file():
            raise TargetError(
                f"{self.name} brings its own tokenizer code ({auto_map}); read it, then allow it: --trust-remote-code"
            )
        try:
            return AutoTokenizer.from_pretrained(str(self.path), trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise TargetError(f"{self.path} has no tokenizer that can be loaded: {error}") from error

    def load_protocol(self, tokenizer: Any, *, min_reasoning_tokens: int = 1) -> ReasoningProtocol:
        """The reasoning protocol of this target's family, with the tokenizer's ids."""
        return ReasoningProtocol.from_tokenizer(
            tokenizer,
            detect_preset(tokenizer, self.config),
            vocab_size=self.vocab_size,
            min_reasoning_tokens=min_reasoning_tokens,
        )

    def read_tensor(self, which: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Reads `embed_tokens`, `lm_head` or `final_norm` straight from the checkpoint, in its own dtype.

        Args:
            which: one of the three names.
            rows: [R] row ids to read; only their bytes are touched. None reads all.

        Raises:
            TargetError: the checkpoint has no such tensor.
        """
        suffix = _TENSOR_SUFFIXES[which]
        if which == "lm_head" and self.config.get("tie_word_embeddings"):
            suffix = _TENSOR_SUFFIXES["embed_tokens"]
        return self.read_named_tensor(suffix, rows)

    def read_named_tensor(self, suffix: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Reads the one tensor whose name ends in `suffix` (`model.layers.0.mlp.up_proj.weight`)."""
        from safetensors import safe_open

        matches = [name for name in self.tensor_files if name == suffix or name.endswith("." + suffix)]
        if len(matches) != 1:
            raise TargetError(f"{self.path}: expected one tensor named ...{suffix}, found {matches or 'none'}")
        with safe_open(self.path / self.tensor_files[matches[0]], framework="pt") as file:
            if rows is None:
                return file.get_tensor(matches[0])
            return file.get_slice(matches[0])[rows.tolist()] if len(rows) else file.get_slice(matches[0])[:0]

    @cached_property
    def tensor_files(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or the single file."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise TargetError(f"{self.path} holds neither model.safetensors nor its index; is it a target model?")
        from safetensors import safe_open

        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)


def resolve_target(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Target:
    """Finds the target named by a path, by `tiny`, or by a Hub name in the local cache.

    Raises:
        UsageError: nothing of that name is here.
    """
    path = Path(name)
    if str(name) == TINY:
        from eagle3_kimi.tiny import cached_tiny_target

        path = cached_tiny_target()
        digest = _check_folder_revision(path, revision)
        return Target(name=TINY, path=path, revision=digest, trust_remote_code=trust_remote_code)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} has no config.json; --target wants a model folder, a Hub name or `tiny`")
        digest = _check_folder_revision(path, revision)
        return Target(name=str(name), path=path, revision=digest, trust_remote_code=trust_remote_code)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(str(name), revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise UsageError(
            f"the target {name} (revision {revision or 'main'}) is neither a folder nor in the local Hub cache; "
            f"fetch it with `hf download {name}` or give its folder"
        ) from error
    return Target(name=str(name), path=snapshot, revision=snapshot.name, trust_remote_code=trust_remote_code)


def _check_folder_revision(path: Path, revision: str | None) -> str:
    """The folder's digest, or the commit that a Hub snapshot's folder is named after."""
    if revision is not None and revision == path.name:
        return revision
    digest = folder_digest(path)
    if revision not in {None, digest}:
        raise UsageError(
            f"{path} is a folder whose content has the digest {digest}; it has no revision {revision!r}. "
            "Leave the revision out, or name the target by its Hub name."
        )
    return digest


def folder_digest(path: Path) -> str:
    """Digest of what decides a local target's behaviour: config, tokenizer files and weight files."""
    digest = hashlib.sha256()
    for file in sorted(
        p for p in path.iterdir() if p.is_file() and p.suffix in {".json", ".safetensors", ".jinja", ".model"}
    ):
        digest.update(file.name.encode())
        if file.suffix == ".safetensors" and file.stat().st_size > 1 << 30:
            digest.update(str(file.stat().st_size).encode())  # hundreds of GB: the header and size stand for it
            with file.open("rb") as handle:
                digest.update(handle.read(1 << 20))
        else:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:40]


def detect_preset(tokenizer: Any, config: dict[str, Any]) -> str:
    """The protocol preset that fits the tokenizer's markers."""
    vocab = tokenizer.get_vocab()
    if "<|tool_calls_section_begin|>" in vocab:
        return "kimi-k2.5" if int(config["vocab_size"]) == 163840 else "tiny-kimi"
    for name in ("qwen3", "deepseek-r1"):
        if all(text in vocab for text in (*PRESETS[name].end_of_turn[:1], "<think>", "</think>")):
            return name
    return "text-think" if "</s>" in vocab else "kimi-k2.5"
