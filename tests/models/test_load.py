"""Loading and saving: the weights come back bit for bit, and what can't be loaded is refused with
the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentevo.config import ModelSection, TinyModel
from agentevo.errors import ModelError
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.save import save_model


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first = one.state_dict()
    second = other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def reload(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSection(name=str(folder), device="cpu", dtype=dtype))  # type: ignore[arg-type]


def test_tiny_is_ready_to_use(tiny: LoadedModel) -> None:
    assert not tiny.model.training
    assert tiny.model.dtype == torch.float32
    assert tiny.name == "tiny"
    assert all(parameter.requires_grad for parameter in tiny.model.parameters())


def test_save_and_load_give_the_same_policy(tiny: LoadedModel, tmp_path: Path) -> None:
    again = reload(save_model(tiny.model, tiny.tokenizer, tmp_path / "checkpoint"))
    assert same_weights(tiny.model, again.model)
    assert not again.model.training
    text = "You stand at P. <answer>Up</answer><|end|>"
    assert again.tokenizer.encode(text) == tiny.tokenizer.encode(text)
    assert again.tokenizer.chat_template == tiny.tokenizer.chat_template


def test_the_processor_of_a_model_that_sees_goes_with_its_weights(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    """Through every save, as a run's checkpoint is read and saved again."""
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "0")
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    (folder / "processor_config.json").write_text("{}")

    for save in range(1, 3):
        read = reload(folder)
        folder = save_model(read.model, read.tokenizer, tmp_path / str(save))

    assert json.loads((folder / "preprocessor_config.json").read_text()) == {"do_resize": True}
    assert (folder / "processor_config.json").is_file()


def test_tied_embeddings_stay_tied(tiny: LoadedModel, tmp_path: Path) -> None:
    config = LlamaConfig(**{**tiny.model.config.to_dict(), "tie_word_embeddings": True})
    tied = LlamaForCausalLM(config)
    again = reload(save_model(tied, tiny.tokenizer, tmp_path / "tied")).model
    assert same_weights(tied, again)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")


def test_weights_with_odd_strides_are_saved(tiny: LoadedModel, tmp_path: Path) -> None:
    head = tiny.model.get_output_embeddings()
    head.weight.data = head.weight.data.t().contiguous().t()
    assert not head.weight.is_contiguous()
    assert same_weights(
        tiny.model, reload(save_model(tiny.model, tiny.tokenizer, tmp_path / "odd")).model
    )


def test_a_prepared_model_saves_as_a_plain_one(tiny: LoadedModel, tmp_path: Path) -> None:
    prepare(tiny.model)
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "prepared")
    assert "agentevo" not in (folder / "config.json").read_text()
    again = reload(folder).model
    assert same_weights(tiny.model, again)
    assert torch.isfinite(again(torch.tensor([[7, 8, 9]])).logits).all()


def test_bfloat16_comes_back_as_bfloat16(
    tiny_section: ModelSection, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    half = load_model(
        tiny_section.model_copy(update={"dtype": "bfloat16"}), corpus=lambda: corpus, seed=0
    )
    again = reload(save_model(half.model, half.tokenizer, tmp_path / "half"), "bfloat16")
    assert half.model.dtype == again.model.dtype == torch.bfloat16
    assert same_weights(half.model, again.model)


def test_positions_stay_exact_in_half_precision(tiny: LoadedModel, tmp_path: Path) -> None:
    """In bfloat16 a frequency is off by up to 0.4%, and a thousand tokens on it is another angle:
    transformers keeps frequencies in float32 beside weights of any dtype."""
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "model")
    loaded = reload(folder, "bfloat16").model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    kept = dict(theirs.named_buffers())
    assert any(name.endswith("rotary_emb.inv_freq") for name in kept)

    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, kept[name])

    ids = torch.arange(7, 107)[None] % tiny.model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)


def test_a_made_model_keeps_its_positions_in_half_precision(
    tiny: LoadedModel, tiny_section: ModelSection, corpus: tuple[str, ...]
) -> None:
    section = tiny_section.model_copy(update={"dtype": "bfloat16"})
    half = load_model(section, corpus=lambda: corpus, seed=0).model
    assert half.dtype == torch.bfloat16
    for name, buffer in half.named_buffers():
        assert torch.equal(buffer, tiny.model.get_buffer(name))


def test_loading_leaves_the_global_generator_alone(tiny: LoadedModel, tmp_path: Path) -> None:
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "model")
    before = torch.get_rng_state()
    reload(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_and_saving_print_nothing(
    tiny: LoadedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reload(save_model(tiny.model, tiny.tokenizer, tmp_path / "model"))
    assert capfd.readouterr() == ("", "")


def test_saving_replaces_an_older_model(
    tiny: LoadedModel, tiny_section: ModelSection, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    save_model(tiny.model, tiny.tokenizer, tmp_path / "model")
    other = load_model(tiny_section, corpus=lambda: corpus, seed=1)
    save_model(other.model, other.tokenizer, tmp_path / "model")
    assert same_weights(other.model, reload(tmp_path / "model").model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_save_keeps_the_older_model(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny.model, tiny.tokenizer, tmp_path / "model")

    def full_disk(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny.tokenizer, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_model(tiny.model, tiny.tokenizer, tmp_path / "model")

    assert same_weights(tiny.model, reload(tmp_path / "model").model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_refuses_a_folder_with_other_things(tiny: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match="holds no model"):
        save_model(tiny.model, tiny.tokenizer, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_missing_weight_is_refused_and_not_made_up(tiny: LoadedModel, tmp_path: Path) -> None:
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        reload(folder)


def test_a_torn_file_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    file = save_model(tiny.model, tiny.tokenizer, tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="can't be read"):
        reload(tmp_path / "model")


def test_a_folder_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ModelError, match="can't be read"):
        reload(tmp_path)


def test_tokenizer_of_another_model_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.tokenizer.add_tokens(["onemoreword"])
    with pytest.raises(ModelError, match="don't belong together"):
        reload(save_model(tiny.model, tiny.tokenizer, tmp_path / "model"))


def test_word_tokenizer_needs_a_corpus(tiny_section: ModelSection) -> None:
    with pytest.raises(ModelError, match=r"model\.tiny\.tokenizer=byte"):
        load_model(tiny_section)

    byte = load_model(
        ModelSection(
            name="tiny",
            device="cpu",
            tiny=TinyModel(hidden_size=16, num_layers=1, num_heads=1, tokenizer="byte"),
        )
    )
    assert len(byte.tokenizer) == 266


def test_cuda_without_a_gpu_is_refused(
    tiny_section: ModelSection, corpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"model\.device=auto"):
        load_model(tiny_section.model_copy(update={"device": "cuda"}), corpus=lambda: corpus)
    auto = load_model(tiny_section.model_copy(update={"device": "auto"}), corpus=lambda: corpus)
    assert auto.model.device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("paligemma", "vision_config", "shows no images to models of type paligemma: choose"),
        ("mistral3", "vision_config", "or one of the types gemma3, .*smolvlm"),
        ("qwen2_audio", "audio_config", "models of type qwen2_audio read audio"),
        ("qwen2_5_omni", "thinker_config", "models of type qwen2_5_omni read audio"),
    ],
)
def test_a_model_that_sees_or_hears_in_another_way_is_refused_as_what_it_is(
    kind: str, part: str, message: str, tiny: LoadedModel, tmp_path: Path
) -> None:
    folder = save_model(tiny.model, tiny.tokenizer, tmp_path / "model")
    settings = {"model_type": kind, part: {"audio_config": {"d_model": 8}}}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        reload(folder)
