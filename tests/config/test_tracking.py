"""The section `tracking`: trackers by name, refused early and with the remedy."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from agentevo.config import build_config, to_yaml
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.runs.orchestration.tracking import check_tracking, chosen_trackers

TREE = {"environment": {"type": "coins"}}


def names(*overrides: str) -> list[str]:
    return [one.name for one in chosen_trackers(build_config(TREE, overrides))]


def test_verls_list_is_taken_as_it_is() -> None:
    assert names() == ["tensorboard"]
    assert names('tracking.backends=["console","wandb"]') == ["tensorboard", "wandb"]
    assert names("tracking.backends=wandb", "tracking.tensorboard=false") == ["wandb"]
    assert names("tracking.backends=[tensorboard]", "tracking.tensorboard=false") == ["tensorboard"]
    assert names("tracking.backends=null") == ["tensorboard"]


def test_options_come_back_from_the_written_configuration() -> None:
    import yaml

    config = build_config(
        TREE, ["tracking.backends=[{name: mlflow, tracking_uri: 'http://127.0.0.1:5000'}, wandb]"]
    )
    again = build_config(yaml.safe_load(to_yaml(config)))
    assert again.tracking == config.tracking
    assert config.tracking.backends[0].tracking_uri == "http://127.0.0.1:5000"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tracking.backends=[wandbb]", "did you mean wandb?"),
        ("tracking.backends=[comet]", "entry point agentevo.trackers"),
        ("tracking.backends=[{mode: offline}]", r"\[0\]\.name: missing; choose one of"),
        ("tracking.backends=[{name: wandb, mode: offlin}]", "did you mean offline?"),
        ("tracking.backends=[{name: wandb, project: x}]", r"\[0\]\.project: unknown key"),
        ("tracking.backends=[wandb, wandb]", "wandb is listed twice"),
        ("tracking.backends=[[wandb]]", "needs a name, or a mapping"),
        ("tracking.backends=[3]", "needs a name, or a mapping"),
        ("trainer.logger=[console]", "verl's trainer.logger is tracking.backends here"),
        (
            "tracking.backends=[{name: mlflow, tracking_uri: 'http://me:hush@host'}]",
            "password would be written",
        ),
    ],
)
def test_what_can_not_be_meant_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config(TREE, [override])


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    config = build_config(TREE, [f"tracking.backends=[{name}]", "tracking.tensorboard=false"])
    with pytest.raises(MissingExtraError, match=f"pip install {name}"):
        check_tracking(config)


def test_wandb_without_a_key_is_refused_before_it_could_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: SimpleNamespace())
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("HOME", str(tmp_path))
    config = build_config(TREE, ["tracking.backends=[wandb]"])
    with pytest.raises(ConfigError, match="mode: offline"):
        check_tracking(config)

    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    check_tracking(config)
    check_tracking(build_config(TREE, ["tracking.backends=[{name: wandb, mode: offline}]"]))
