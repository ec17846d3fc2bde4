from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.vocab import build_vocab_map
from eagle3_kimi.target import Target
from tests.training.toy import AUX, VOCAB, ToyTarget


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return ToyTarget().save(tmp_path / "target")


@pytest.fixture
def build_drafter(target: Target) -> Callable[[int], DraftModel]:
    """A drafter of the toy target over so many of its tokens."""

    def build(draft_vocab_size: int) -> DraftModel:
        torch.manual_seed(0)
        config = DrafterConfig.for_target(target.config, draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX)
        model = DraftModel(config)
        if draft_vocab_size < VOCAB:
            vocab_map = build_vocab_map(torch.arange(VOCAB) % 7, draft_vocab_size=draft_vocab_size)
            model.d2t.copy_(vocab_map.d2t)
            model.t2d.copy_(vocab_map.t2d)
        return model

    return build


@pytest.fixture
def exported(target: Target, build_drafter: Callable[[int], DraftModel], tmp_path: Path) -> Path:
    """An exported drafter over 12 of the toy target's 40 tokens."""
    export_drafter(build_drafter(12), tmp_path / "drafter", target=target)
    return tmp_path / "drafter"
