"""How large the demo is, and how its launched stages run on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_kimi.errors import UsageError
from eagle3_kimi.tiny.model import AUX_LAYER_IDS


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo; the defaults end in minutes on two cores."""

    target: str = "tiny"
    """The target model; another folder of the same family works too."""
    aux_layer_ids: tuple[int, ...] = AUX_LAYER_IDS
    """Boundary ids of the captured layers."""
    held_out_problems: int = 60
    """Problems the target is asked, to say how well it reasons."""
    problems: int = 480
    """Conversations with one turn."""
    tool_conversations: int = 120
    """Conversations with a tool call, its result, and an answer: two turns each."""
    validation_fraction: float = 0.1
    """Share of conversations kept for the validation split."""
    held_out_prompts: int = 48
    """Prompts of the acceptance measurement; none of them was trained on."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    max_model_len: int = 1024
    """Longest prompt plus answer."""
    num_speculative_tokens: int = 3
    """Draft length when serving."""
    train_config: str = "train/configs/tiny.yaml"
    """The trainer's options, inside the repository."""
    train_options: tuple[str, ...] = ()
    """More options of the trainer; they win over the file."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Processes of the launched stages."""

    config: str
    """File of accelerate_configs/."""
    processes: int
    dtype: str
    """Of target and hidden states."""
    precision: str
    """Of the trainer."""
    launch_environment: dict[str, str] = field(default_factory=dict)
    """Of the launched processes."""
    engine_environment: dict[str, str] = field(default_factory=dict)
    """Of the process that generates."""


def choose_topology() -> Topology:
    """One GPU where there is one, else two CPU processes: both really communicate, and two cores carry them."""
    import torch

    if torch.cuda.is_available():
        return Topology(config="1gpu.yaml", processes=1, dtype="bfloat16", precision="bf16")
    return Topology(
        config="cpu_2.yaml",
        processes=2,
        dtype="float32",
        precision="fp32",
        launch_environment={"OMP_NUM_THREADS": "1"},  # a core for each process
        # one process instead of three: on two cores the engine starts in half the time
        engine_environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )


def find_repository(candidates: Iterable[Path] | None = None) -> Path:
    """The clone that holds train/ and accelerate_configs/: they are launched, not imported.

    Args:
        candidates: folders to look at; by default where the package lies, and the working folder.

    Raises:
        UsageError: the package was installed without them.
    """
    import eagle3_kimi

    for folder in candidates or (Path(eagle3_kimi.__file__).resolve().parents[1], Path.cwd()):
        if (folder / "train" / "train_drafter.py").is_file() and (folder / "accelerate_configs").is_dir():
            return folder
    raise UsageError(
        "the demo launches train/extract_hidden_states.py and train/train_drafter.py, which are not here; run it from "
        "a clone of the repository"
    )
