"""The few errors a person can cause. Each message says what was expected, what came, what to do."""

from __future__ import annotations


class Eagle3KimiError(Exception):
    """Base of the errors the command line prints as one sentence. `exit_code` 1: not good enough; 2: wrong usage."""

    exit_code = 1


class UsageError(Eagle3KimiError, ValueError):
    """An option, a path or a combination of them is wrong."""

    exit_code = 2


class TargetError(Eagle3KimiError, ValueError):
    """The target model, its tokenizer or its chat template cannot serve this job."""


class EngineError(Eagle3KimiError, RuntimeError):
    """The engine is not installed, cannot run here, or failed."""


class DataError(Eagle3KimiError, ValueError):
    """Data that are not complete, do not match, or are damaged."""


class RunStopped(Eagle3KimiError, RuntimeError):
    """A run stopped itself because going on would waste time; what was made is kept."""


class HubError(Eagle3KimiError, RuntimeError):
    """The Hub cannot be reached, or says no; what was uploaded stays."""
