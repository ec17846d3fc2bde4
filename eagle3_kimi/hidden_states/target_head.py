"""The target's own final norm and head, read from its checkpoint: from final states to choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.topk import BestTokens, TopTargets, find_best
from eagle3_kimi.target import Target

_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class TokenScores:
    """What the target thinks of given next tokens; one entry a row, on the CPU."""

    argmax: Tensor
    """int64 [N]: the target's own choice."""
    log_prob: Tensor
    """float32 [N]: of the given token."""
    regret: Tensor
    """float32 [N]: nats by which the target's own choice is likelier."""
    entropy: Tensor
    """float32 [N]: of the whole distribution, in nats."""
    variance: Tensor
    """float32 [N]: of the log-probability of a token drawn from the distribution."""


class TargetHead:
    """`lm_head(norm(h))`, in the target's dtype as the engines compute it, a few hundred rows at a time.

    Args:
        target: the target model; only its norm and head are read.
        dtype: of the weights and the product; logits are then float32.
        device: where the head lives: V*H values.
        tokens: the ids whose rows are kept, where other ranks have the others; None keeps all.
    """

    def __init__(
        self,
        target: Target,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tokens: range | None = None,
    ) -> None:
        head = target.read_tensor("lm_head")
        if tokens is not None:
            head = head[tokens.start : tokens.stop].clone()  # the rest of it goes
        self._norm = target.read_tensor("final_norm").to(device, dtype)
        self._first_id = tokens.start if tokens else 0
        self._head = head.to(device, dtype)
        self._eps = target.rms_norm_eps

    @property
    def device(self) -> torch.device:
        """Where the head lives."""
        return self._head.device

    @property
    def norm_weight(self) -> Tensor:
        """[H], float32, on the CPU."""
        return self._norm.float().cpu()

    def logits(self, states: Tensor) -> Tensor:
        """[N, H] states before the final norm -> float32 [N, V] logits, on the head's device."""
        hidden = states.to(self._head.device, torch.float32)
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self._eps)
        return (self._norm * hidden.to(self._norm.dtype) @ self._head.T).float()

    @torch.inference_mode()
    def argmax(self, states: Tensor) -> Tensor:
        """[N, H] -> int64 [N], on the CPU."""
        parts = [self.logits(part).argmax(-1).cpu() for part in states.split(_ROWS_AT_ONCE)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def find_top(self, states: Tensor, k: int) -> TopTargets:
        """[N, H] -> the k most likely tokens after each (V if there are fewer), on the CPU."""
        return self.find_best(states, min(k, len(self._head))).among_all()

    @torch.inference_mode()
    def find_best(self, states: Tensor, k: int) -> BestTokens:
        """[N, H] -> the k best of this head's tokens, on the CPU."""
        parts = (find_best(self.logits(part), k, first_id=self._first_id) for part in states.split(_ROWS_AT_ONCE))
        return BestTokens.cat([part.to("cpu") for part in parts])

    @torch.inference_mode()
    def score(self, states: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> TokenScores:
        """Scores the token that follows each state.

        Args:
            states: [N, H], before the final norm.
            token_ids: int64 [N].
            temperature: the sampling's; it scales all but the argmax.
        """
        argmax, log_prob, regret, entropy, variance = [], [], [], [], []
        for rows, tokens in zip(states.split(_ROWS_AT_ONCE), token_ids.split(_ROWS_AT_ONCE), strict=True):
            logits = self.logits(rows)
            log_probs = torch.log_softmax(logits / temperature, dim=-1)
            argmax.append(logits.argmax(-1).cpu())
            given = log_probs.gather(1, tokens.to(logits.device)[:, None])[:, 0]
            log_prob.append(given.cpu())
            regret.append((log_probs.amax(-1) - given).cpu())
            probs = log_probs.exp()
            mean = (probs * log_probs).sum(-1)
            entropy.append(-mean.cpu())
            variance.append(((probs * log_probs.square()).sum(-1) - mean.square()).clamp_min_(0).cpu())
        return TokenScores(*map(torch.cat, (argmax, log_prob, regret, entropy, variance)))
