"""A small byte-level BPE tokenizer with Kimi's control tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3_kimi.tiny.problems import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024

SPECIAL_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                  "[UNK]", "[PAD]")  # fmt: skip
PLAIN_TOKENS = ("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
"""`special: false`, as in Kimi: they survive `skip_special_tokens=True`."""

_SPLIT = r"[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+"
"""Digits alone (a digit is then the same token wherever it is copied to), words with the blank before them."""


def build_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on the problems' texts; the same problems give the same vocabulary."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(PLAIN_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(problems), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]"
    )
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def _texts(problems: list[Problem]) -> list[str]:
    texts = ["user", "assistant", "system", "tool", "tool_declare", "## Return of functions.multiply:0\n"] * 50
    for problem in problems:
        texts += [str(m["content"]) for m in problem.messages] + [problem.reasoning, problem.answer]
        texts += [str(problem.tool_calls)] if problem.tool_calls else []
    return texts
