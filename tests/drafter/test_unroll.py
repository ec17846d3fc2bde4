"""The unrolled drafter against a naive one: dense masks over all steps' keys, all rows, one sample at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.drafter.attention import attend
from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.rope import rotate
from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.drafter.target_mlp import TargetMLP
from eagle3_kimi.target import Target, resolve_target
from tests.largest_tensor import LargestTensor


def build_model(*, kv_heads: int = 4, rope_scaling: dict | None = None) -> DraftModel:
    config = DrafterConfig(
        hidden_size=16,
        vocab_size=23,
        draft_vocab_size=11,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=24,
        aux_layer_ids=(1, 2, 3),
        target_num_layers=4,
        max_position_embeddings=64,
        rope_scaling=rope_scaling,
    )
    model = DraftModel(config)
    generator = torch.Generator().manual_seed(1)
    model.initialise(
        embed_tokens=torch.randn(23, 16, generator=generator),
        lm_head=torch.randn(11, 16, generator=generator),
        final_norm=torch.rand(16, generator=generator) + 0.5,
        seed=0,
    )
    return model


def naive_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """All rows [R, N, C] of the last step over the keys of every step, under a literal mask."""
    rows, heads, size = q.shape
    groups = heads // keys[0].shape[1]
    causal, diagonal = torch.ones(rows, rows).tril().bool(), torch.eye(rows).bool()
    mask = torch.cat([causal] + [diagonal] * (len(keys) - 1), dim=1)
    k = torch.cat(keys).repeat_interleave(groups, dim=1)
    v = torch.cat(values).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qnc,knc->nqk", q, k) / size**0.5
    return torch.einsum("nqk,knc->qnc", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def naive_unroll(model: DraftModel, tokens: Tensor, prompt: int, aux: Tensor, steps: int) -> list[Tensor]:
    """Normed states of the supervised rows of each step; sample of S tokens, aux of rows 0..S-3."""
    layer, rows = model.midlayer, len(tokens) - 2
    padded = torch.cat((tokens, torch.zeros(steps, dtype=torch.int64)))
    state, keys, values, normed = model.fc(aux), [], [], []
    for step in range(steps):
        embedding = F.embedding(padded[1 + step : 1 + step + rows], model.embed_tokens)
        joined = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(state)), dim=-1)
        rotation = model.rotation(torch.arange(rows) + step)
        heads = [p(joined).unflatten(-1, (-1, 8)) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
        keys.append(rotate(heads[1], rotation))
        values.append(layer.self_attn.v_proj(joined).unflatten(-1, (-1, 8)))
        attention = naive_attention(rotate(heads[0], rotation), keys, values)
        residual = layer.self_attn.o_proj(attention.flatten(1)) + state
        state = layer.mlp(layer.post_attention_layernorm(residual)) + residual
        normed.append(model.norm(state)[prompt - 1 : max(rows - step, prompt - 1)])
    return normed


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sizes", [[(9, 3)], [(2, 1)], [(5, 4), (12, 1), (7, 5), (3, 1)]])
def test_values_and_gradients_equal_the_naive_ones(sizes: list[tuple[int, int]], kv_heads: int) -> None:
    """Sizes are (S, P); (5, 4) has no supervised row at all, (2, 1) not even a row."""
    steps, generator = 4, torch.Generator().manual_seed(len(sizes))
    model = build_model(kv_heads=kv_heads)
    samples = [(torch.randint(23, (s,), generator=generator), p) for s, p in sizes]
    aux = [torch.randn(s - 2, 48, generator=generator, requires_grad=True) for s, _ in sizes]
    naive = [naive_unroll(model, tokens, p, a, steps) for (tokens, p), a in zip(samples, aux, strict=True)]
    naive_states = [torch.cat([one[k] for one in naive]) for k in range(steps)]

    packed = model.unroll(
        torch.cat(aux),
        torch.cat([tokens[1:-1] for tokens, _ in samples]),
        torch.cat([tokens[p:-1] for tokens, p in samples]),
        PackedRows.build([(p - 1, s - 1 - p) for s, p in sizes], steps),
    )

    leaves = [*model.parameters(), *aux]
    probes = [torch.randn(state.shape, generator=generator) for state in naive_states]
    for step, (ours, theirs) in enumerate(zip(packed, naive_states, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=f"step {step}")
        grads = [
            torch.autograd.grad((s * probes[step]).sum(), leaves, retain_graph=True, materialize_grads=True)
            for s in (ours, theirs)
        ]
        for mine, reference in zip(*grads, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5)


def test_attention_of_a_literal_sample() -> None:
    """Zero queries see all their keys alike, so the output is the mean of the values they may see.

    step 0     1 2 3 4 | 10 20 30      two documents, the first row of each is context
    step 1       5                     step 2 has the second row of the first document alone:
    step 2       8                     it sees 1, 2, 5 and 8
    """
    documents = PackedRows.build([(1, 3), (1, 2)], ttt_steps=3).documents
    keys = torch.randn(7, 1, 8)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0])[:, None, None].expand(7, 1, 8).contiguous()
    step_0 = attend(torch.zeros(5, 2, 8), keys, values, [], documents)
    assert step_0[:, 1, 3].tolist() == pytest.approx([1.5, 2.0, 2.5, 15.0, 20.0])

    later = [(torch.randn(1, 1, 8), torch.full((1, 1, 8), value)) for value in (5.0, 8.0)]
    step_2 = attend(torch.zeros(1, 2, 8), keys, values, later, documents)
    assert step_2[0, :, 0].tolist() == pytest.approx([4.0, 4.0])


def test_memory_grows_with_the_rows_alone() -> None:
    """No tensor of forward or backward is rows x rows: twice the document, twice the largest one."""
    model, largest = build_model(kv_heads=2), []
    for length in (256, 512):
        tokens = torch.arange(length) % 23
        rows = PackedRows.build([(length // 2 - 1, length // 2 - 1)], ttt_steps=3)
        with LargestTensor() as seen:
            states = model.unroll(torch.randn(length - 2, 48), tokens[1:-1], tokens[length // 2 : -1], rows)
            torch.cat(states).sum().backward()
        largest.append(seen.numel)
    assert largest[1] <= 2.02 * largest[0]
    assert largest[1] < 512 * 512


def test_rows_of_a_literal_sample() -> None:
    """S = 8, P = 3, then S = 5, P = 2: the drawing in `rows`, continued by a second document."""
    rows = PackedRows.build([(2, 4), (1, 2)], ttt_steps=3)

    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert rows.supervised.tolist() == [2, 3, 4, 5, 7, 8]
    assert [step.tolist() for step in rows.steps] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 4], [0, 1]]
    assert [rows.targets(k).tolist() for k in range(3)] == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 5], [2, 3]]
    assert rows.kept(2, of=1).tolist() == [0, 1]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_rotation_depends_on_the_distance_alone(scaling: dict | None) -> None:
    model = build_model(rope_scaling=scaling)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    scores = [
        (rotate(q, model.rotation(torch.tensor([p + 5]))) * rotate(k, model.rotation(torch.tensor([p])))).sum()
        for p in (0, 1, 40)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))


def test_near_the_target_the_drafter_is_its_head_on_the_deepest_state_and_a_row_attends_to_itself() -> None:
    model = build_model(kv_heads=2)
    model.start_near_target(aux_size=2.0)
    tokens, aux = torch.arange(9), torch.randn(7, 48, generator=torch.Generator().manual_seed(2))
    rows = PackedRows.build([(2, 5)], 2)
    first, second = model.unroll(aux, tokens[1:-1], tokens[3:-1], rows)
    expected = model.norm(aux[2:, -16:] / 2)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected[:-1])
    joined = model.midlayer.join(torch.randn(64, 16), torch.randn(64, 16))
    still = model.rotation(torch.zeros(64))
    queries = model.midlayer.self_attn.queries(joined, still)
    keys, _ = model.midlayer.self_attn.keys_values(joined, still)
    scores = torch.einsum("qnc,knc->nqk", queries, keys.repeat_interleave(2, dim=1))
    assert (scores.argmax(dim=-1) == torch.arange(64)).float().mean() > 0.2  # by chance 1 / 64


@pytest.mark.parametrize("channels", [24, 7, 40], ids=["of the same size", "a small expert", "a large one"])
def test_near_the_target_the_mlp_is_a_share_of_the_targets(channels: int) -> None:
    """In the units of the target: its state, and what its own MLP would add to that."""
    model, generator = build_model(), torch.Generator().manual_seed(3)
    norm = torch.rand(16, generator=generator) + 0.5
    gate, up = torch.randn(2, channels, 16, generator=generator)
    down = torch.randn(16, channels, generator=generator)
    model.start_near_target(aux_size=2.0, mlp=TargetMLP(norm=norm, gate=gate, up=up, down=down))
    aux = torch.randn(7, 48, generator=generator)
    (found,) = model.unroll(aux, torch.arange(7), torch.arange(5), PackedRows.build([(2, 5)], 1))
    state = aux[2:, -16:]
    x = F.rms_norm(state, (16,), norm, 1e-6)
    used = slice(min(channels, 24))
    added = (F.silu(x @ gate[used].T) * (x @ up[used].T)) @ down[:, used].T
    torch.testing.assert_close(found, model.norm(state + 0.3 * added), rtol=1e-4, atol=1e-4)


def test_of_a_layer_of_experts_the_shared_ones_are_the_start(tiny_target: Path) -> None:
    target = resolve_target(tiny_target)
    dense, experts = TargetMLP.read(target, 0), TargetMLP.read(target, 3)
    assert dense is not None
    assert experts is not None
    sizes = target.config["intermediate_size"], target.config["moe_intermediate_size"]
    assert (len(dense.gate), len(experts.gate)) == sizes
    shared = target.read_named_tensor("model.layers.3.mlp.shared_experts.down_proj.weight")
    assert torch.equal(experts.down, shared.float())


def test_packed_weights_and_other_activations_are_no_start(tmp_path: Path) -> None:
    names = [f"language_model.model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names.append("language_model.model.layers.1.post_attention_layernorm.weight")
    target = write_target(tmp_path / "plain", names)
    assert TargetMLP.read(target, 1) is not None
    assert TargetMLP.read(target, 0) is None
    assert TargetMLP.read(write_target(tmp_path / "gelu", names, hidden_act="gelu"), 1) is None
    packed = [name.replace("weight", "weight_packed") for name in names]
    assert TargetMLP.read(write_target(tmp_path / "packed", packed), 1) is None


def write_target(folder: Path, names: list[str], **config: object) -> Target:
    folder.mkdir()
    save_file({name: torch.ones(4, 4) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4, **config}))
    return resolve_target(folder)
