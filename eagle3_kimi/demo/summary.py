"""`summary.json`, a public interface, and the table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY_SCHEMA_VERSION = 1
"""Raised when a name below changes its meaning."""


def build_summary(
    answers: dict[str, Any],
    samples: dict[str, Any],
    states: dict[str, Any],
    training: dict[str, Any],
    serving: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The summary from the stages' results."""

    def pick(result: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: result[name] for name in names}

    return {
        "schema_version": SUMMARY_SCHEMA_VERSION,
        "engine": {"name": serving["engine"].split()[0], "version": serving["version"], "device": serving["device"]},
        "target": pick(answers, "problems", "complete", "correct"),
        "samples": pick(samples, "prompts", "complete", "quarantined", "by_reason"),
        "hidden_states": pick(states, "samples", "tokens", "bytes_per_token", "contract"),
        "training": pick(
            training, "steps", "supervised_tokens", "ttt_steps", "world_size", "simulated_acceptance_length"
        ),
        "serving": pick(
            serving,
            "engine",
            "num_speculative_tokens",
            "num_prompts",
            "acceptance_length",
            "acceptance_per_position",
            "untrained_acceptance_length",
            "identical_outputs",
        ),
        "seconds": seconds,
    }


def render_table(summary: dict[str, Any]) -> Table:
    """The summary as a table for the terminal: a row a stage."""
    from rich.table import Table

    engine = summary["engine"]
    table = Table(title=f"tiny Kimi target, {engine['name']} {engine['version']} on {engine['device']}")
    table.add_column("stage")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    for name, text in describe_stages(summary).items():
        table.add_row(name, text, f"{summary['seconds'][name]:.0f}")
    table.add_section()
    table.add_row("all", describe_outcome(summary), f"{sum(summary['seconds'].values()):.0f}")
    return table


def describe_stages(summary: dict[str, Any]) -> dict[str, str]:
    """Stage -> what came out of it, in a line."""
    samples, states, training = summary["samples"], summary["hidden_states"], summary["training"]
    serving, contract, answers = summary["serving"], states["contract"], summary["target"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in samples["by_reason"].items())
    counts = f"{samples['prompts']} prompts = {samples['complete']} complete + {samples['quarantined']} quarantined"
    passed = f"contract {'passed' if contract['passed'] else 'failed'}, agreement {contract['agreement']}"
    steps = f"{training['steps']} steps on {training['world_size']} processes"
    simulated = f"simulated acceptance length {training['simulated_acceptance_length']:.2f} (k={training['ttt_steps']})"
    positions = " / ".join(f"{share:.2f}" for share in serving["acceptance_per_position"])
    return {
        "target": f"held-out problems: {answers['complete']} of {answers['problems']} answers complete, "
        f"{answers['correct']} correct",
        "prompts": "generated problems, mixed from two sources",
        "samples": f"{counts} ({reasons})" if reasons else counts,
        "hidden_states": f"{states['tokens']:,} tokens of {states['bytes_per_token']:,.0f} bytes; {passed}",
        "training": f"{steps}, {training['supervised_tokens']:,} supervised tokens; {simulated}",
        "serving": f"{serving['engine']}, {serving['num_prompts']} held-out prompts; accepted by position: {positions}",
    }


def describe_outcome(summary: dict[str, Any]) -> str:
    """What it was all for, in a line."""
    serving = summary["serving"]
    most = serving["num_speculative_tokens"] + 1
    same = "token-identical to" if serving["identical_outputs"] else "DIFFERENT from"
    return (
        f"{serving['acceptance_length']:.2f} of at most {most} tokens a target forward, bonus token included "
        f"({serving['untrained_acceptance_length']:.2f} untrained); text {same} plain decoding"
    )
