"""Trains the tiny target on worked problems until it thinks, closes its thoughts, answers and stops.

Seeded, and cached under a fingerprint of the code that decides it. Muon for the matrices, since with AdamW
alone the attention that copies digits does not form in this time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from eagle3_kimi.chat import render_answer, render_prompt
from eagle3_kimi.tiny.problems import Problem, generate_problems

logger = logging.getLogger(__name__)

PRESET = "tiny-kimi"


@dataclass(frozen=True, kw_only=True)
class TinyTraining:
    """How the tiny target is trained."""

    steps: int = 440
    """Optimizer steps."""
    batch_size: int = 16
    """Problems a step."""
    num_problems: int = 6000
    """Training problems; held-out ones have another seed."""
    muon_lr: float = 0.006
    """Learning rate of the matrices."""
    adamw_lr: float = 3e-3
    """Learning rate of embeddings, head, norms and expert stacks."""
    warmup_steps: int = 20
    """Linear warm-up."""
    seed: int = 0
    """Seed of weights, problems and order."""


def train_tiny_target(directory: Path, config: TinyTraining | None = None) -> Path:
    """Trains the tiny target, or finds it in `directory`, and returns its folder.

    Two processes that ask at once train once. The folder appears whole or not at all.
    """
    config = config or TinyTraining()
    path = directory / _fingerprint(config)
    if (path / "config.json").is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        if (path / "config.json").is_file():
            return path
        logger.info("training the tiny target once (about two minutes on two cores); it is kept in %s", path)
        work = Path(tempfile.mkdtemp(prefix="tiny-", dir=directory))
        try:
            _train(work, config)
            os.replace(work, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return path


def _fingerprint(config: TinyTraining) -> str:
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in ("problems.py", "tokenizer.py", "model.py", "training.py", "chat_template.jinja"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _train(path: Path, config: TinyTraining) -> None:
    import torch
    from transformers import DeepseekV3ForCausalLM

    from eagle3_kimi.tiny.model import build_config
    from eagle3_kimi.tiny.tokenizer import build_tokenizer

    problems = list(generate_problems(config.num_problems, config.seed))
    tokenizer = build_tokenizer(problems)
    examples = [encode_problem(tokenizer, problem) for problem in problems]
    ids = tokenizer.get_vocab()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = DeepseekV3ForCausalLM(
            build_config(len(tokenizer), eos_token_id=ids["<|im_end|>"], pad_token_id=ids["[PAD]"])
        ).float()
        model.set_experts_implementation("grouped_mm")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        head.weight = embedding.weight  # tied while training: a copied token is then one linear map, not one a token
        optimizers = _build_optimizers(model, config)
        for step, batch in enumerate(_batches(examples, config)):
            loss = _train_step(model, optimizers, batch, _learning_rate_factor(step, config))
            if step % 50 == 0 or step == config.steps - 1:
                logger.info("tiny target: step %d of %d, loss %.3f", step, config.steps, loss)
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def encode_problem(tokenizer: Any, problem: Problem) -> tuple[list[int], list[int]]:
    """Prompt ids and output ids of a worked problem."""
    prompt = render_prompt(tokenizer, problem.messages, tools=problem.tools, preset=PRESET)
    answer = {"reasoning": problem.reasoning, "content": problem.answer, "tool_calls": problem.tool_calls}
    return prompt, render_answer(tokenizer, answer, preset=PRESET)


def _build_optimizers(model: Any, config: TinyTraining) -> list[Any]:
    import torch

    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _learning_rate_factor(step: int, config: TinyTraining) -> float:
    """Linear warm-up, flat for 70% of the steps, then a line down to 2%."""
    warm, flat = min(1.0, (step + 1) / config.warmup_steps), 0.7 * config.steps
    return warm * min(1.0, max(0.02, (config.steps - step) / (config.steps - flat)))


def _batches(examples: list[tuple[list[int], list[int]]], config: TinyTraining) -> Any:
    """`config.steps` batches of examples of like length (little padding), in seeded order."""
    rng = random.Random(f"tiny-batches-{config.seed}")
    size, made = config.batch_size, 0
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order) - 16 * size + 1, 16 * size):
            pool = sorted(order[start : start + 16 * size], key=lambda i: sum(map(len, examples[i])))
            batches = [pool[i : i + size] for i in range(0, len(pool), size)]
            rng.shuffle(batches)
            for batch in batches:
                if made == config.steps:
                    return
                made += 1
                yield [examples[i] for i in batch]


def _train_step(model: Any, optimizers: list[Any], batch: list[tuple[list[int], list[int]]], factor: float) -> float:
    import torch
    from torch.nn.functional import cross_entropy

    longest = max(len(prompt) + len(output) for prompt, output in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full((len(batch), longest), -100)
    for row, (prompt, output) in enumerate(batch):
        ids[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
        labels[row, len(prompt) : len(prompt) + len(output)] = torch.tensor(output)
    hidden = model.model(ids).last_hidden_state[:, :-1]
    supervised = labels[:, 1:] != -100
    loss = cross_entropy(model.lm_head(hidden[supervised]), labels[:, 1:][supervised])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
