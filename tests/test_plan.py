from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3_kimi.cli import app
from eagle3_kimi.errors import UsageError
from eagle3_kimi.plan import (
    PlanRequest,
    check_online,
    choose_tensor_parallel_size,
    count_drafter_parameters,
    make_plan,
    parse_gpus,
)
from eagle3_kimi.target_sizes import TargetSizes, read_target_sizes

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def build_kimi_request(**changes: object) -> PlanRequest:
    values = {"target": read_target_sizes("moonshotai/Kimi-K2.5"), "samples": 88000, "mean_tokens": 2000, **changes}
    return PlanRequest(**values)  # type: ignore[arg-type]


def test_kimi_weighs_what_its_files_do() -> None:
    kimi = read_target_sizes("moonshotai/Kimi-K2.5")
    expert = 3 * 7168 * 2048  # gate, up, down
    assert kimi.parameters["routed_experts"] == 60 * 384 * expert == 1_014_686_023_680
    assert kimi.parameters["shared_experts"] == 60 * expert
    assert kimi.parameters["dense"] == 3 * 7168 * 18432  # the first layer
    # q_a + q_b + kv_a + kv_b + o
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    assert kimi.parameters["attention"] == 61 * attention
    assert kimi.weight_bytes["routed_experts"] == 1_014_686_023_680 * (4 / 8 + 2 / 32)  # int4, a bf16 scale per 32
    assert kimi.weight_bytes["head"] == 163840 * 7168 * 2
    assert sum(kimi.weight_bytes.values()) == pytest.approx(595e9, rel=0.005)  # its repository, vision tower included
    assert kimi.active_parameters == pytest.approx(32e9, rel=0.02)  # its model card
    assert kimi.kv_bytes_per_token == kimi.kv_bytes_per_gpu(8) == 61 * (512 + 64) * 2  # MLA: whole on every GPU


def test_a_dense_target_with_grouped_heads() -> None:
    llama = TargetSizes(name="llama", config=LLAMA)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64  # q, k and v of 2 heads of 16, o
    assert llama.parameters == {"embedding": 6400, "head": 0, "attention": 3 * attention, "dense": 3 * 3 * 64 * 96}
    assert llama.active_parameters == 6400 + 3 * attention + 3 * 3 * 64 * 96
    assert llama.kv_bytes_per_token == 3 * 2 * 32 * 2
    assert llama.kv_bytes_per_gpu(2) == llama.kv_bytes_per_gpu(8) == llama.kv_bytes_per_token / 2


def test_the_formats_of_a_store() -> None:
    plan = make_plan(build_kimi_request())
    assert plan.peers_bytes == 57_344
    assert list(plan.store_bytes) == [("fp8", "topk"), ("fp8", "state"), ("bf16", "topk"), ("bf16", "state")]


def test_kimi_on_eight_gpus() -> None:
    request = build_kimi_request()
    plan = make_plan(request)
    assert plan.tensor_parallel_size == 8
    generation, one_pass, extraction, training, online = plan.phases
    weights = sum(request.target.weight_bytes.values()) / 8
    cache = 0.9 * 96e9 - weights - 4e9
    assert generation.memory == {"target": weights, "workspace": 4e9, "cache": cache}
    assert generation.bytes == pytest.approx(0.9 * 96e9)
    assert generation.note.startswith(f"{int(cache / 70_272 / 2000)} sequences")
    assert one_pass.note.startswith(f"{int(cache / (70_272 + 57_344) / 2000)} sequences")
    # 2 x 31.7 G multiplications a token, 8 x 148 TFLOPS at 35%
    assert extraction.seconds == pytest.approx(176e6 * 2 * request.target.active_parameters / (8 * 148e12 * 0.35))
    parameters = 3 * 7168**2 + 3 * 2 * 7168 * 8192 + 8192 * 7168 + 3 * 7168 * 18432 + 32000 * 7168
    assert count_drafter_parameters(request.drafter) == parameters
    assert training.memory["drafter and optimizer"] == 18 * parameters
    assert (generation.fits, one_pass.fits, extraction.fits, training.fits, online.fits) == (
        True,
        True,
        True,
        True,
        False,
    )
    assert plan.other_disk["checkpoints"] == 3 * 12 * parameters


def test_larger_gpus_carry_target_and_drafter_together() -> None:
    online = make_plan(build_kimi_request(gpu_bytes=192e9)).phases[-1]
    assert online.fits
    assert online.bytes < 0.9 * 192e9


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"moonshotai/Kimi-K2.5 and its drafter need 129 GB on each GPU .*90% of 96 GB"
    ):
        check_online(build_kimi_request(), 8)
    with pytest.raises(UsageError, match=r"need 649 GB on each GPU"):  # all 594 of the target
        check_online(build_kimi_request(gpu_bytes=192e9), 1)
    larger = build_kimi_request(gpu_bytes=192e9)
    trainer = sum(make_plan(larger).phases[3].memory.values())
    assert check_online(larger, 8) == pytest.approx(0.9 - trainer / 192e9)


def test_smaller_gpus_do_not_carry_the_target() -> None:
    plan = make_plan(build_kimi_request(gpu_bytes=80e9))
    assert [phase.fits for phase in plan.phases] == [False, False, False, True, False]
    assert [phase.seconds is None for phase in plan.phases] == [True, True, True, False, True]


def test_a_small_target_has_a_copy_on_every_gpu() -> None:
    llama = TargetSizes(name="llama", config=LLAMA)
    assert choose_tensor_parallel_size(build_kimi_request(target=llama)) == 1
    assert choose_tensor_parallel_size(build_kimi_request(num_gpus=16)) == 8
    assert choose_tensor_parallel_size(build_kimi_request(num_gpus=6)) == 2  # nothing that divides them holds it


def test_training_reads_supervised_rows_only() -> None:
    seconds = [make_plan(build_kimi_request(answer_share=share, ttt_steps=1)).phases[3].seconds for share in (1.0, 0.5)]
    config = build_kimi_request().drafter
    always = 3 * 7168**2 + 2 * 2 * 7168 * 8192  # fc, keys and values
    rest = count_drafter_parameters(config) - always - 32000 * 7168
    whole, half = (always + share * (rest + 32000 * 7168 * 4 / 3) for share in (1.0, 0.5))
    assert seconds[0] == pytest.approx(6 * whole * 176e6 * 3 / (8 * 148e12 * 0.35))
    assert seconds[1] == pytest.approx(6 * half * 176e6 * 3 / (8 * 148e12 * 0.35))


def test_the_shipped_tiny_config_is_the_tiny_targets(tiny_target: Path) -> None:
    real = json.loads((tiny_target / "config.json").read_text())
    shipped = read_target_sizes("tiny").config
    assert shipped == {key: real[key] for key in shipped}


@pytest.mark.parametrize("text", ["8", "8x", "x96GB", "0x96GB", "8x0GB", "8x96TB", "eight"])
def test_gpus_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="written like 8x96GB"):
        parse_gpus(text)
    assert parse_gpus("8x96GB") == parse_gpus("8x96") == (8, 96e9)


def test_bad_requests_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples must be above 0, not 0"):
        build_kimi_request(samples=0)
    with pytest.raises(UsageError, match="answer_share"):
        build_kimi_request(answer_share=1.5)
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_target_sizes(str(tmp_path))
    with pytest.raises(UsageError, match="hf download nobody/nothing"):
        read_target_sizes("nobody/nothing")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(UsageError, match="has no 'vocab_size'"):
        read_target_sizes(str(tmp_path))
    quantised = {**LLAMA, "quantization_config": {"quant_method": "gguf"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UsageError, match="came gguf"):
        read_target_sizes(str(tmp_path))


def test_the_command_prints_every_phase_and_format() -> None:
    result = CliRunner().invoke(app, ["plan"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("594 GB", "176,000,000 tokens", "22,061", "3.88 TB", "generation", "extraction", "training", "online"):
        assert text in result.output
    assert "Assumed:" in result.output


def test_a_disk_that_is_too_small_is_exit_code_1(tmp_path: Path) -> None:
    small = ["plan", "--target", "tiny", "--samples", "10", "--draft-vocab-size", "400", "--disk", str(tmp_path)]
    result = CliRunner().invoke(app, small)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path} has" in result.output
    large = ["plan", "--samples", "1000000000000", "--aux-dtype", "bf16", "--disk", str(tmp_path)]
    result = CliRunner().invoke(app, large)
    assert result.exit_code == 1
    assert "warning" in result.output
    assert "store aux fp8 and targets topk" in result.output


def test_without_a_disk_the_current_folder_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "--samples", "1000000000000"])
    assert result.exit_code == 0, result.output
    assert f"warning: {tmp_path} has" in result.output


def test_planning_imports_no_torch() -> None:
    code = "import sys; from eagle3_kimi.cli import app; app(['plan'], standalone_mode=False); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")
