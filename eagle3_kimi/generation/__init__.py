"""Generation: conversations -> journal of reasoning-complete samples and their quarantine."""

from __future__ import annotations

from eagle3_kimi.generation.config import GenerationConfig, fingerprint, journal_key
from eagle3_kimi.generation.journal import Journal
from eagle3_kimi.generation.run import GenerationRun, RunReport

__all__ = ["GenerationConfig", "GenerationRun", "Journal", "RunReport", "fingerprint", "journal_key"]
