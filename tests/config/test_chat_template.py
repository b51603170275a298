"""`model.chat_template`: a name, a file or the template itself."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from agentevo.config import ModelSection, TinyModel, build_config, load_config, to_yaml
from agentevo.errors import ConfigError, ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.load import load_model
from agentevo.types import Message

SHOUTS = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + ('HEY ' if m.role == 'user' else '') -}}"
    "{{- m.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}


def config_of(template: object):
    return build_config(
        {"environment": {"type": "coins"}, "model": {**TINY, "chat_template": template}}
    )


def test_a_file_is_read_into_the_recipe_and_the_model_speaks_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shouts.jinja").write_text(SHOUTS)
    config = config_of("shouts.jinja")
    (tmp_path / "shouts.jinja").unlink()
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    again = load_config("again.yaml")
    assert again.model.chat_template == config.model.chat_template == SHOUTS

    loaded = load_model(again.model)
    ids = ChatFormat(loaded.tokenizer).first_prompt([Message("user", "red")])
    assert loaded.tokenizer.decode(ids) == "<|user|>HEY red<|end|><|assistant|>"


def test_the_default_is_the_tokenizers_own():
    section = ModelSection(name="tiny", tiny=TinyModel(tokenizer="byte", hidden_size=32))
    own = load_model(section).tokenizer.chat_template
    named = load_model(section.model_copy(update={"chat_template": "hermes"})).tokenizer
    assert "<tools>" not in own and "<tools>" in named.chat_template


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("hermez", "'hermez' is not a file: give a Jinja file, or a template's name"),
        ("empty.jinja", "is not a Jinja template"),
        ("bytes.jinja", "can't be read"),
        ("dollar.jinja", "the template has"),
        (3, "'3' is not a file"),
        ("x" * 9000, "is not a file"),
    ],
)
def test_what_is_no_template_is_refused(template, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jinja").write_text("no template")
    (tmp_path / "dollar.jinja").write_text("{{ messages }} ${HOME}")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff{{")
    with pytest.raises(ConfigError, match=f"model.chat_template: .*{words}"):
        config_of(template)


@pytest.mark.slow
def test_a_base_model_speaks_by_the_plain_template(tmp_path):
    section = ModelSection(name="tiny", tiny=TinyModel(tokenizer="byte", hidden_size=32))
    base = load_model(section)
    base.tokenizer.chat_template = None
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"set model\.chat_template=plain for a base model"):
        ChatFormat(load_model(ModelSection(name=str(tmp_path))).tokenizer)

    tokenizer = load_model(ModelSection(name=str(tmp_path), chat_template="plain")).tokenizer
    end = tokenizer.eos_token
    chat = ChatFormat(tokenizer)
    asked = chat.first_prompt([Message("system", "Be brief."), Message("user", "red?")])
    assert tokenizer.decode(asked) == "Be brief.\n\nUser: red?\nAssistant:\n"
    told = chat.completion(Message("assistant", "<answer>no</answer>"))
    assert tokenizer.decode(told) == f"<answer>no</answer>{end}"
    assert tokenizer.eos_token_id in chat.end_ids
    going_on = chat.continuation([Message("user", "blue?")], ended_with_stop=True)
    assert tokenizer.decode(going_on) == "\nUser: blue?\nAssistant:\n"
    with pytest.raises(ModelError, match="no place for the role tool"):
        chat.first_prompt([Message("user", "red?"), Message("tool", "9", tool_call_id="a")])


@pytest.mark.parametrize("begins", [True, False])
def test_the_plain_template_begins_as_the_tokenizer_begins_a_text(begins, tmp_path):
    section = ModelSection(name="tiny", tiny=TinyModel(tokenizer="byte", hidden_size=32))
    base = load_model(section)
    backend = base.tokenizer.backend_tokenizer
    base.tokenizer.bos_token = base.tokenizer.eos_token
    start = base.tokenizer.bos_token
    if begins:
        backend.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, base.tokenizer.bos_token_id)]
        )
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(ModelSection(name=str(tmp_path), chat_template="plain"))
    ids = ChatFormat(loaded.tokenizer).first_prompt([Message("user", "red?")])
    assert loaded.tokenizer.decode(ids) == begins * start + "User: red?\nAssistant:\n"


def test_the_plain_template_needs_an_end_of_text():
    section = ModelSection(name="tiny", tiny=TinyModel(tokenizer="byte", hidden_size=32))
    tokenizer = load_model(section.model_copy(update={"chat_template": "plain"})).tokenizer
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="the tokenizer has none"):
        ChatFormat(tokenizer)
