"""What a format costs: the sum on paper equals the file on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.formats import FeatureFormat, bytes_per_token
from eagle3_kimi.hidden_states.quantize import quantize
from eagle3_kimi.hidden_states.store import FeatureSample, FeatureStore, FeatureStoreWriter, StoreManifest, check_store
from eagle3_kimi.hidden_states.topk import find_best

KIMI = {"hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 61}
FORMATS = [
    FeatureFormat(),
    FeatureFormat(targets="state"),
    FeatureFormat(aux_dtype="bf16"),
    FeatureFormat(aux_dtype="bf16", targets="state"),
    FeatureFormat(aux_dtype="fp32", targets="state"),
    FeatureFormat(num_outliers=0, top_k=8),
]


def build_manifest(config: dict[str, int], store_format: FeatureFormat) -> StoreManifest:
    return StoreManifest(
        target="t", target_revision="r", hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"], aux_layer_ids=(2, 30, 58), dtype="bfloat16", format=store_format,
        dataset_fingerprint="d", protocol="kimi-k2.5", contract={"passed": True, "agreement": 1.0},
    )  # fmt: skip


def build_sample(
    name: str, config: dict[str, int], store_format: FeatureFormat, *, length: int, prompt: int
) -> FeatureSample:
    generator = torch.Generator().manual_seed(len(name))
    hidden, vocab, rows = config["hidden_size"], config["vocab_size"], length - 1 - prompt
    aux = torch.randn(length - 1, 3 * hidden, generator=generator)
    state_dtype = getattr(torch, store_format.state_dtype)
    top = final = None
    if store_format.targets == "topk":
        top = find_best(4 * torch.randn(rows, vocab, generator=generator), store_format.top_k).among_all()
    else:
        final = torch.randn(rows, hidden, generator=generator).to(state_dtype)
    quantized = quantize(aux, num_layers=3, num_outliers=store_format.num_outliers)
    return FeatureSample(
        id=name,
        split="train",
        token_ids=torch.randint(vocab, (length,), generator=generator),
        num_prompt_tokens=prompt,
        spans=(),
        aux_hidden_states=quantized if store_format.aux_dtype == "fp8" else aux.to(state_dtype),
        final_hidden_states=final,
        top_targets=top,
        target_argmax=torch.randint(vocab, (rows,), generator=generator) if top is None else top.choice.long(),
    )


@pytest.mark.parametrize("store_format", FORMATS, ids=str)
def test_what_is_written_is_what_was_counted_and_comes_back(tmp_path: Path, store_format: FeatureFormat) -> None:
    config = {"hidden_size": 96, "vocab_size": 400, "num_hidden_layers": 61}
    sample = build_sample("s", config, store_format, length=301, prompt=50)
    with FeatureStoreWriter(tmp_path, build_manifest(config, store_format)) as writer:
        writer.add(sample)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("padding/"))
    # 300 inputs and 250 supervised positions of 301 tokens, so a row of aux and one of targets less than on paper
    counted = bytes_per_token(config, store_format, 251 / 301) * 301
    row = bytes_per_token(config, store_format, 1.0) - 4
    assert counted - stored == pytest.approx(row)
    came = FeatureStore(tmp_path)[0]
    assert came.to_tensors().keys() == sample.to_tensors().keys()
    for name, tensor in came.to_tensors().items():
        assert torch.equal(tensor.view(torch.uint8), sample.to_tensors()[name].contiguous().view(torch.uint8)), name
    assert torch.equal(came.target_argmax, sample.target_argmax)
    assert FeatureStore(tmp_path).manifest.format == store_format
    assert check_store(tmp_path).ok


def test_a_token_of_kimi_costs_less_than_half_of_the_usual(tmp_path: Path) -> None:
    """Written for real, mostly supervised: shard and index together."""
    sample = build_sample("kimi", KIMI, FeatureFormat(), length=200, prompt=20)
    with FeatureStoreWriter(tmp_path, build_manifest(KIMI, FeatureFormat())) as writer:
        writer.add(sample)
    written = sum(file.stat().st_size for file in tmp_path.glob("features-*"))
    assert written / 200 <= 22528
    assert bytes_per_token(KIMI, FeatureFormat(), 1.0) == 4 + 3 * (7168 + 4 + 16 * 4) + 64 * 6 + 4 == 22100
    assert written / 200 == pytest.approx(bytes_per_token(KIMI, FeatureFormat(), 0.9), rel=0.01)
    usual = bytes_per_token(KIMI, FeatureFormat(aux_dtype="bf16", targets="state"))
    assert usual == pytest.approx(57344, rel=0.001)
    assert 22528 < usual / 2


def test_a_format_is_not_mixed_with_another(tmp_path: Path) -> None:
    config = {"hidden_size": 96, "vocab_size": 400, "num_hidden_layers": 61}
    manifest = build_manifest(config, FeatureFormat())
    with FeatureStoreWriter(tmp_path, manifest) as writer:
        writer.add(build_sample("s", config, FeatureFormat(), length=9, prompt=3))
        with pytest.raises(ValueError, match=r"holds .*final_hidden_states.* a store of aux fp8 with 16 outliers"):
            writer.add(build_sample("other", config, FeatureFormat(targets="state"), length=9, prompt=3))
    for other in FORMATS[1:]:
        with pytest.raises(ValueError, match="format aux fp8 with 16 outliers, targets top 64 against aux"):
            FeatureStoreWriter(tmp_path, replace(manifest, format=other))
    assert json.loads((tmp_path / "store.json").read_text())["format"]["aux_dtype"] == "fp8"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="fp8, bf16, fp32"):
        FeatureFormat(aux_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="topk, state"):
        FeatureFormat(targets="logits")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="top_k"):
        FeatureFormat(top_k=0)
