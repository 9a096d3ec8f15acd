"""A checkpoint is described and loaded, or refused in one line that names the field or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ConfigRefused, ModelError
from engine.models.registry import LoadedModel, describe, load_model
from engine.ops.reference.ops import ReferenceOps
from engine.spec import Dense, Kda, Latent, Moe
from tests.fakes.decoder import a_device

FOLDER = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny"
ROOT = "model.language_model."
Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, tmp_path / name)
    return tmp_path


def edit(folder: Path, change: Change) -> None:
    """Change the config: (whole, its text_config)."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config, config["text_config"])
    file.write_text(json.dumps(config))


def load(folder: Path, progress: Callable[[int, int], None] = lambda _d, _t: None) -> LoadedModel:
    device = a_device()
    return load_model(folder, ReferenceOps(device), device, progress)


def test_the_tiny_checkpoint_is_described() -> None:
    spec = describe(FOLDER)
    mixers = [type(layer.mixer) for layer in spec.layers]
    assert mixers == [Kda, Kda, Latent, Kda, Latent, Kda]
    assert [type(layer.ffn) for layer in spec.layers] == [Dense, *[Moe] * 5]
    assert spec.draft is not None
    assert spec.residual is not None
    assert (spec.residual.streams, spec.residual.eps, spec.residual.rounds) == (4, 0.004, 3)
    assert spec.end_ids == (230, 237, 239)
    assert spec.context == 4096
    assert spec.image_token == 264
    assert spec.usable_vocab == spec.vocab == 272


def test_progress_reaches_the_text_part_and_goes_up() -> None:
    seen: list[tuple[int, int]] = []
    model = load(FOLDER, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {model.source.total_bytes}
    assert seen[-1][0] / seen[-1][1] > 0.9
    assert model.config["model_type"] == "glm5_next"


REFUSED: dict[str, Change] = {
    "qk_rope_head_dim": lambda _, text: text.update(qk_rope_head_dim=8),
    "q_lora_rank": lambda _, text: text.update(q_lora_rank=None),
    "index_topk": lambda _, text: text.update(index_topk=18),
    "num_key_value_heads": lambda _, text: text.update(num_key_value_heads=2),
    "attention_bias": lambda _, text: text.update(attention_bias=True),
    "index_kpool_compress": lambda _, text: text.update(index_kpool_compress=False),
    "index_kpool_always_select_tail": lambda _, text: text.update(
        index_kpool_always_select_tail=False
    ),
    "index_kpool ": lambda _, text: text.update(index_kpool=0),
    "index_head_dim": lambda _, text: text.update(index_head_dim=0),
    "indexer_types": lambda _, text: text["indexer_types"].__setitem__(2, "shared"),
    "scoring_func": lambda _, text: text.update(scoring_func="softmax"),
    "topk_method": lambda _, text: text.update(topk_method="greedy"),
    "hidden_act": lambda _, text: text.update(hidden_act="gelu"),
    "num_experts_per_tok": lambda _, text: text.update(num_experts_per_tok=9),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_geometry_that_would_answer_wrongly_is_refused(folder: Path, field: str) -> None:
    """R7, glm 1.3."""
    describe(folder)
    edit(folder, REFUSED[field])
    with pytest.raises(ConfigRefused, match=field) as refused:
        describe(folder)
    assert "\n" not in str(refused.value)


BROKEN: dict[str, tuple[Change, str]] = {
    "missing": (lambda _, text: text.pop("hidden_size"), "hidden_size"),
    "pool missing": (lambda _, text: text.pop("index_kpool"), "index_kpool"),
    "text for a number": (lambda _, text: text.update(rms_norm_eps="small"), "rms_norm_eps"),
    "half a layer": (lambda _, text: text.update(num_hidden_layers=6.5), "num_hidden_layers"),
    "true for a number": (lambda _, text: text.update(hc_mult=True), "hc_mult"),
    "kinds": (lambda _, text: text["layer_types"].append("linear_attention"), "layer_types"),
    "unknown kind": (lambda _, text: text["layer_types"].__setitem__(0, "mamba"), "mamba"),
    "unknown ffn": (lambda _, text: text["mlp_layer_types"].__setitem__(0, "odd"), "odd"),
    "no names": (lambda _, text: text.update(layer_types=3), "layer_types"),
    "no object": (lambda whole, _: whole.update(text_config=3), "text_config"),
    "model type": (lambda whole, _: whole.update(model_type="gpt9"), "gpt9"),
    "no model type": (lambda whole, _: whole.pop("model_type"), "model_type"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_is_refused_by_field(folder: Path, name: str) -> None:
    change, named = BROKEN[name]
    edit(folder, change)
    with pytest.raises(ModelError, match=named) as refused:
        describe(folder)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_config_that_cannot_be_read_is_refused(folder: Path, text: str | None) -> None:
    file = folder / "config.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        describe(folder)


def test_what_a_config_leaves_open_has_the_family_s_rules(folder: Path) -> None:
    """glm 1.3: kinds by layer number, KDA fields at top level, and both ways to a lower bound."""
    edit(folder, lambda _, text: (text.pop("layer_types"), text.pop("mlp_layer_types")))
    edit(folder, lambda _, text: text.pop("indexer_types"))
    spec = describe(folder)
    assert [i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, Latent)] == [3]
    assert [type(layer.ffn) for layer in spec.layers] == [*[Dense] * 3, *[Moe] * 3]

    def bound() -> float | None:
        mixer = describe(folder).layers[0].mixer
        assert isinstance(mixer, Kda)
        return mixer.lower_bound

    edit(folder, lambda _, text: text["linear_attn_config"].update(gate_lower_bound=None))
    assert bound() == -5.0
    edit(folder, lambda _, text: text["linear_attn_config"].update(safe_gate=False))
    assert bound() is None
    flat = {"linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    edit(folder, lambda _, text: (text.pop("linear_attn_config"), text.update(flat)))
    assert bound() is None
    edit(folder, lambda _, text: text.update(linear_lower_bound=-3.0))
    assert bound() == -3.0


def test_a_flat_config_is_read(folder: Path) -> None:
    """glm 1.3: a text-only config keeps the text fields at top level."""
    whole = describe(folder)
    file = folder / "config.json"
    text = json.loads(file.read_text())["text_config"]
    file.write_text(json.dumps(text))
    flat = describe(folder)
    assert flat.layers == whole.layers
    assert flat.image_token is None


def test_ids_without_a_token_are_not_usable(folder: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 11}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert describe(folder).usable_vocab == 12


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    "name",
    [
        f"{ROOT}embed_tokens.weight",
        "lm_head.weight",
        f"{ROOT}layers.0.hc_attn_fn",
        f"{ROOT}layers.0.self_attn.A_log",
        f"{ROOT}layers.2.self_attn.kv_b_proj.weight",
        f"{ROOT}layers.3.mlp.experts.5.up_proj.weight",
        f"{ROOT}layers.6.eh_proj.weight",
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(folder: Path, name: str) -> None:
    load(folder)
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(ModelError, match=name) as misshapen:
        load(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=name) as missing:
        load(folder)
    for refused in (misshapen, missing):
        assert "\n" not in str(refused.value)


def test_an_index_key_norm_without_its_bias_is_refused(folder: Path) -> None:
    """R24: without the bias the selection is wrong, and only beyond the dense limit."""
    name = f"{ROOT}layers.2.self_attn.indexer.k_norm.bias"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigRefused, match=r"k_norm\.bias"):
        load(folder)
