"""Where the trainer's time goes: what its matrix products take alone, and what longer documents cost.

    OMP_NUM_THREADS=1 python benchmarks/trainer_profile.py

One optimizer step over random states, in float32, with the sizes of a SmolLM2 drafter (hidden size 576, draft
vocabulary 8,192); two thirds of each document are supervised. No target, no data. Times are CPU seconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.hidden_states.store import FeatureSample
from eagle3_kimi.training.batches import PackedBatch, pack
from eagle3_kimi.training.channels import ChannelRates
from eagle3_kimi.training.step import apply_gradients
from eagle3_kimi.training.ttt import TrainingTimeTest

HIDDEN, VOCAB, DRAFT_VOCAB, AUX = 576, 49152, 8192, (2, 15, 27)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = "flash_attention"


def build_module(ttt_steps: int) -> TrainingTimeTest:
    """Random weights; the first ids are the draft vocabulary."""
    config = DrafterConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        aux_layer_ids=AUX,
        target_num_layers=30,
        max_position_embeddings=8192,
    )
    model, head = DraftModel(config), torch.randn(DRAFT_VOCAB, HIDDEN) * HIDDEN**-0.5
    model.initialise(embed_tokens=torch.randn(VOCAB, HIDDEN), lm_head=head, final_norm=torch.ones(HIDDEN), seed=0)
    model.t2d[:DRAFT_VOCAB] = True
    norm = torch.ones(HIDDEN)
    return TrainingTimeTest(model, target_head=head, final_norm=norm, final_norm_eps=1e-5, ttt_steps=ttt_steps)


def build_batch(length: int, tokens: int, ttt_steps: int) -> PackedBatch:
    """`tokens` tokens in documents of `length`."""
    prompt = length // 3
    samples = [
        FeatureSample(
            id=str(number),
            split="train",
            token_ids=torch.randint(DRAFT_VOCAB, (length,)),
            num_prompt_tokens=prompt,
            spans=(),
            aux_hidden_states=torch.randn(length - 1, len(AUX) * HIDDEN),
            final_hidden_states=torch.randn(length - 1 - prompt, HIDDEN),
            target_argmax=torch.randint(DRAFT_VOCAB, (length - 1 - prompt,)),
        )
        for number in range(tokens // length)
    ]
    return pack(samples, ttt_steps, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)


class Step:
    """One optimizer step over a batch."""

    def __init__(self, module: TrainingTimeTest) -> None:
        self.module, self.parameters = module, list(module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True)
        self.rates = ChannelRates(module.draft_model.fc.weight, torch.ones(len(AUX) * HIDDEN))

    def __call__(self, batch: PackedBatch) -> None:
        loss, counts = self.module(batch)
        loss.backward()
        apply_gradients(
            self.parameters,
            self.optimizer,
            supervised_tokens=counts[1],
            world_size=1,
            max_grad_norm=1.0,
            learning_rate=1e-3,
            channel_rates=self.rates,
        )


def measure_cpu_seconds(step: Step, batch: PackedBatch, repeats: int) -> float:
    """Median of some steps, after one to warm up."""
    step(batch)
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        step(batch)
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def measure_shares(step: Step, batch: PackedBatch) -> dict[str, float]:
    """Operator -> its own share of a step's CPU time, the largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    own = {event.key: float(event.self_cpu_time_total) for event in profiler.key_averages()}
    total = sum(own.values())
    return {name: value / total for name, value in sorted(own.items(), key=lambda item: -item[1])}


def list_products(step: Step, batch: PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random factors of the sizes of each matrix product in a step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(batch)
    products = []
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key in PRODUCTS:
            left, right = [torch.randn(shape) for shape in event.input_shapes if len(shape) > 1][-2:]
            products += [(left, right)] * event.count
    return products


def measure_products_alone(step: Step, batch: PackedBatch, repeats: int) -> float:
    """CPU time of a step's matrix products with nothing in between, over that of the step: median of turns."""
    products = list_products(step, batch)
    ratios = []
    for _ in range(repeats):
        started = time.process_time()
        step(batch)
        between = time.process_time()
        for left, right in products:
            torch.matmul(left, right)
        ratios.append((time.process_time() - between) / (between - started))
    return statistics.median(ratios)


def main() -> None:
    """Parses and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ttt", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 4096], help="tokens of a document")
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for ttt_steps in options.ttt:
        step = Step(build_module(ttt_steps))
        taken = {}
        for length in options.lengths:
            batch = build_batch(length, options.tokens, ttt_steps)
            taken[length] = measure_cpu_seconds(step, batch, options.repeats) / batch.num_tokens
            print(f"TTT {ttt_steps}, documents of {length}: {1 / taken[length]:.0f} tokens a CPU second")
        print(f"  longest over shortest, time a token: {taken[max(taken)] / taken[min(taken)]:.2f}")
        batch = build_batch(min(taken), options.tokens, ttt_steps)
        alone = measure_products_alone(step, batch, options.repeats)
        print(f"  its matrix products alone take {alone:.2f} of the time of a step with the shortest")
        shares = measure_shares(step, batch)
        products = sum(share for name, share in shares.items() if name in PRODUCTS)
        attention = sum(share for name, share in shares.items() if ATTENTION in name)
        print(f"  matrix products {products:.0%}, flash attention {attention:.0%}; the rest:")
        rest = [(n, s) for n, s in shares.items() if n not in PRODUCTS and ATTENTION not in n]
        print("  " + ", ".join(f"{name.removeprefix('aten::')} {share:.1%}" for name, share in rest[:10]))


if __name__ == "__main__":
    main()
