"""A tiny Kimi target with random weights, so that every layer changes the states visibly, and samples it produced."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict

from eagle3_kimi.target import Target, folder_digest
from eagle3_kimi.tiny.model import build_config

VOCAB_SIZE = 320
AUX_LAYER_IDS = (1, 2, 3)


def save_random_target(path: Path, *, seed: int, dtype: str = "float32") -> Target:
    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = build_config(VOCAB_SIZE, eos_token_id=1, pad_token_id=0)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)  # a norm applied twice must show
            elif name == "lm_head.weight":
                parameter.normal_(std=0.5)  # peaked distributions: a wrong state is a visible surprise
            elif parameter.ndim > 1:
                parameter.normal_(std=0.06)
    config.dtype = dtype
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return Target(name=str(path), path=path, revision=folder_digest(path))


def generate_rows(target: Target, count: int, *, temperature: float) -> list[dict]:
    """Rows as the data set holds them; prompts of 3 to 60 tokens, answers of 4 to 40."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.path).eval()
    torch.manual_seed(1)
    rows = []
    for index in range(count):
        prompt = torch.randint(2, VOCAB_SIZE, (3 + 7 * index % 58,))
        new = 4 + 11 * index % 37
        sampling = (
            {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature, "top_k": 0}
        )
        ids = model.generate(prompt[None], max_new_tokens=new, eos_token_id=None, **sampling)[0]
        output = ids[len(prompt) :].tolist()
        rows.append(
            {
                "id": f"sample-{index:03d}",
                "prompt_token_ids": prompt.tolist(),
                "output_token_ids": output,
                "spans": [
                    {"kind": "reasoning", "start": 0, "end": 2},
                    {"kind": "answer", "start": 3, "end": len(output) - 1},
                ],
                "provenance": {"temperature": temperature, "protocol": "tiny-kimi"},
            }
        )
    return rows


def save_rows(rows: list[dict], path: Path, *, validation: int = 2) -> Path:
    splits = {"train": Dataset.from_list(rows[validation:]), "validation": Dataset.from_list(rows[:validation])}
    DatasetDict(splits).save_to_disk(path)
    return path


def read_config(target: Target) -> dict:
    return json.loads((target.path / "config.json").read_text(encoding="utf-8"))
