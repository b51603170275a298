"""Names of models: folders, known names, hub names, and what is none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentevo.errors import ModelError, UnknownNameError
from agentevo.models.files.known_models import known_models
from agentevo.models.files.resolve import fetch, missing_model, resolve


def model_folder(folder: Path, without: str = "") -> Path:
    """A folder with the names of what a model's has, but for one."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if name != without:
            (folder / name).write_text("{}")
    return folder


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    model_folder(tmp_path)
    assert resolve(str(tmp_path)) == tmp_path
    assert fetch(str(tmp_path)) == tmp_path


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_folder_in_the_working_directory_wins_over_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(Path("smollm2-135m-instruct"))
    assert resolve("smollm2-135m-instruct") == Path("smollm2-135m-instruct")


def test_a_hub_name_is_left_as_it_is() -> None:
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_name_that_says_that_it_is_the_hubs_is_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    model_folder(Path("org/name"))
    assert resolve("org/name") == Path("org/name")
    assert resolve("hf://org/name") == "org/name"
    with pytest.raises(ModelError, match="a hub model is written hf://org/name"):
        resolve("hf://../name")


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "smollm2_135m_instruct"])
def test_an_unknown_name_is_refused_with_the_nearest_known(name: str) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m-instruct'"):
        resolve(name)


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (lambda: model_folder(Path("m"), "tokenizer.json"), "m", r"no tokenizer \(tokenizer\.json"),
        (lambda: model_folder(Path("m"), "model.safetensors"), "m", "a config.json and no weights"),
        (lambda: Path("m.gguf").touch(), "m.gguf", "GGUF is a format for inference, and training"),
        (lambda: None, "nowhere/m.gguf", "there is no such file, and training needs the Hugging"),
        (lambda: Path("m.bin").touch(), "m.bin", "this is a file: give the folder"),
        (lambda: Path("m").symlink_to("m"), "m", "this is not a folder"),
        (lambda: None, "/nowhere/m", r"there is no such folder \(looked for /nowhere/m\)"),
        (lambda: None, "./m", "there is no such folder"),
        (lambda: None, "a/b/c", "there is no such folder"),
        (lambda: None, "~nobody-of-that-name/m", "write the whole path"),
        (lambda: None, "x" * 300, "a name of 300 bytes"),
        (lambda: None, "a\0b", "NUL"),
    ],
)
def test_what_is_no_model_is_told_apart(tmp_path, monkeypatch, make, name, expected) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    with pytest.raises(ModelError, match=expected):
        resolve(name)


@pytest.mark.parametrize("name", ["zzzzqqqq", ""])
def test_a_name_like_no_other_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(
        (UnknownNameError, ModelError), match="known models: smollm2-135m-instruct, tiny"
    ):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["agentevo-nobody/no-such-model", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_a_hub_model_out_of_reach_names_the_way_without_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def out_of_reach(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    with pytest.raises(ModelError, match=r"no network.*smollm2-135m-instruct"):
        fetch(name)


def test_a_hub_model_is_fetched_through_huggingface_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path)
    )
    told: list[str] = []
    assert fetch("some-org/some-model", told.append) == tmp_path
    assert asked == ["some-org/some-model"]
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.cold_start
def test_known_models_are_listed_without_torch() -> None:
    assert "smollm2-135m-instruct" in known_models.names()
    program = (
        "import agentevo.models.files.resolve, sys; assert not {'torch', 'transformers', "
        "'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_runs_folder_is_its_best_checkpoint(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for step in (3, 6):
        (checkpoints / f"step-{step:06d}").mkdir(parents=True)
        (checkpoints / f"step-{step:06d}" / "config.json").touch()

    index = checkpoints / "index.json"
    index.write_text('{"steps": [3, 6], "best": {"step": 3, "value": 0.5}}')
    assert resolve(str(tmp_path)) == checkpoints / "step-000003"

    for which, step in (("best", 3), ("last", 6), ("6", 6)):
        assert resolve(f"{tmp_path}@{which}") == checkpoints / f"step-{step:06d}"
        assert not missing_model(f"{tmp_path}@{which}")

    for which, words in (("7", "no checkpoint of step 7: its steps are 3, 6"), ("x", "@STEP")):
        with pytest.raises(ModelError, match=words):
            resolve(f"{tmp_path}@{which}")

    index.write_text('{"steps": [3, 6], "best": null}')
    assert resolve(str(tmp_path)) == checkpoints / "step-000006"

    (checkpoints / "step-000006" / "config.json").rename(
        checkpoints / "step-000006" / "adapter_config.json"
    )
    with pytest.raises(ModelError, match=r"model\.lora\.adapter=.*step-000006"):
        resolve(str(tmp_path))

    index.write_text('{"steps": [], "best": null}')
    with pytest.raises(ModelError, match="no whole checkpoint"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"steps": [3]}',
        '{"steps": 3, "best": null}',
        '{"best": {"step": null}}',
        '{"best": 1}',
    ],
)
def test_a_torn_list_of_checkpoints_is_said_to_be_torn(content, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json is torn|no whole checkpoint"):
        resolve(str(tmp_path))
