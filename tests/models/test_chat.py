"""Turn-by-turn encoding: the pieces put together are what the template renders, and what can't be
continued is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import PHI3, tokenizer_with
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer, word_tokenizer
from agentevo.types import Message

CHATML = "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' -}}"
PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"


def loop(body: str, prompt: str = PROMPT) -> str:
    return (
        "{%- for m in messages -%}{%- set content = m.content -%}"
        + body
        + "{%- endfor -%}"
        + prompt
    )


STRIPS_THINKING = loop(
    "{%- if m.role == 'assistant' and '</think>' in content -%}{%- set content = "
    "content.split('</think>')[-1] -%}{%- endif -%}" + CHATML
)
OPENS_THINKING = loop(
    CHATML,
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
)
TRIMS = loop("{%- set content = content | trim -%}" + CHATML)

NO_END = loop(
    "{{- m.role + ': ' + content + '\n' -}}",
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}",
)
ENDS_ONLY_THE_LAST = loop(
    "{{- '<|im_start|>' + m.role + '\n' + content -}}{%- if loop.last -%}{{- '<|im_end|>' -}}{%- "
    "endif -%}"
)
NUMBERS_TURNS = loop("{{- loop.length ~ ' messages' -}}" + CHATML)
DROPS_HISTORY = loop("{%- if m.role == 'user' or loop.last -%}" + CHATML + "{%- endif -%}")
SHOUTS = loop(
    "{%- if m.role == 'assistant' -%}{%- set content = content | upper -%}{%- endif -%}" + CHATML
)
FORGETS_HEADER = loop(
    CHATML, "{%- if add_generation_prompt -%}{{- '<|im_start|>robot\n' -}}{%- endif -%}"
)
COUNTS_AFTER = loop(
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '!' * loop.index0 + '\n' -}}"
)
MOVES_SYSTEM = (
    "{%- for m in messages if m.role != 'system' -%}{%- set content = m.content -%}"
    "{%- if loop.last and messages[0].role == 'system' -%}{%- set content = messages[0].content "
    "+ content -%}{%- endif -%}" + CHATML + "{%- endfor -%}" + PROMPT
)
REFUSES_SYSTEM = loop(
    "{%- if m.role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}" + CHATML
)


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return encode(
        tokenizer,
        tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True),
    )


def played(
    chat: ChatFormat, start: list[Message], turns: list[tuple[str, str]], *, cut: bool
) -> list[int]:
    """The ids an engine would have seen: each turn is (what the model said, what the user then
    said)."""
    ids = chat.first_prompt(start)
    for said, asked in turns:
        ids += encode(chat.tokenizer, said) + ([] if cut else [chat.end_of_turn_id])
        ids += chat.continuation([Message("user", asked)], ended_with_stop=not cut)
    return ids


def dialogue(start: list[Message], turns: list[tuple[str, str]]) -> list[Message]:
    return [
        *start,
        *(
            message
            for said, asked in turns
            for message in (Message("assistant", said), Message("user", asked))
        ),
    ]


TEMPLATES = {
    "tiny": byte_tokenizer(512).chat_template,
    "chatml": loop(CHATML),
    "strips thinking": STRIPS_THINKING,
}
FORMATS = {
    name: ChatFormat(byte_tokenizer(512) if name == "tiny" else with_template(text))
    for name, text in TEMPLATES.items()
}
plain = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=20)


@pytest.mark.parametrize("name", list(FORMATS))
@given(
    asked=plain,
    turns=st.lists(st.tuples(plain, plain), max_size=3),
    system=st.none() | plain,
    cut=st.booleans(),
)
def test_the_pieces_are_what_the_template_renders(
    name: str, asked: str, turns: list[tuple[str, str]], system: str | None, cut: bool
) -> None:
    chat = FORMATS[name]
    start = [*([Message("system", system)] if system is not None else []), Message("user", asked)]
    assert played(chat, start, turns, cut=cut) == rendered(chat.tokenizer, dialogue(start, turns))


def test_word_tokenizer_continues_by_the_template() -> None:
    tokenizer = word_tokenizer(["You see a lake.\n", "Go Left or Right"], 64)
    chat = ChatFormat(tokenizer)
    start = [Message("system", "You see a lake.\n"), Message("user", "Go")]
    turns = [("<answer>Left</answer>", "You see a lake.\n")] * 3
    assert played(chat, start, turns, cut=False) == rendered(tokenizer, dialogue(start, turns))
    assert (
        tokenizer.decode(chat.continuation([Message("user", "Go")], ended_with_stop=True))
        == "<|user|>Go<|end|><|assistant|>"
    )
    assert (
        tokenizer.decode(chat.continuation([Message("user", "Go")], ended_with_stop=False))
        == "<|end|><|user|>Go<|end|><|assistant|>"
    )


def test_stripped_thinking_stays_in_what_the_policy_sees() -> None:
    chat = FORMATS["strips thinking"]
    ids = played(chat, [Message("user", "q")], [("<think>hm</think>yes", "why?")], cut=False)
    assert chat.tokenizer.decode(ids) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>hm</think>yes<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_that_opens_the_thinking_is_continued() -> None:
    chat = ChatFormat(with_template(OPENS_THINKING))
    text = chat.tokenizer.decode(chat.continuation([Message("user", "why?")], ended_with_stop=True))
    assert text == "\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_template_that_ends_the_text_behind_the_turn_is_continued() -> None:
    """Phi-3: what stands behind a finished conversation stands in none that goes on."""
    chat = ChatFormat(tokenizer_with(PHI3))
    assert chat.opening == ""
    turns = [("one", "and?"), ("two", "so?")]
    start = [Message("user", "count")]
    assert played(chat, start, turns, cut=False) == rendered(chat.tokenizer, dialogue(start, turns))
    assert chat.text(chat.completion(Message("assistant", "one"))) == "one"


def test_a_template_that_trims_contents_is_continued() -> None:
    chat = ChatFormat(with_template(TRIMS))
    assert (
        chat.tokenizer.decode(chat.first_prompt([Message("user", " hi\n")]))
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_new_messages_and_text_like_the_sentinel() -> None:
    chat = FORMATS["chatml"]
    new = [Message("tool", "probefirst"), Message("user", "probesecond probequestion")]
    text = chat.tokenizer.decode(chat.continuation(new, ended_with_stop=True))
    assert text == (
        "\n<|im_start|>tool\nprobefirst<|im_end|>\n<|im_start|>user\nprobesecond "
        "probequestion<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        (NO_END, "no special token at the end"),
        (ENDS_ONLY_THE_LAST, "differently once another message follows"),
        (NUMBERS_TURNS, "does not begin with"),
        (DROPS_HISTORY, "drops or changes"),
        (SHOUTS, "drops or changes"),
        (FORGETS_HEADER, "generation prompt"),
        (COUNTS_AFTER, "depends on how many turns"),
        ("{{- raise_exception('never') -}}", "refuses a conversation"),
    ],
)
def test_templates_that_rewrite_history_are_refused(template: str | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ChatFormat(with_template(template))


@pytest.mark.parametrize("template", [MOVES_SYSTEM, REFUSES_SYSTEM])
def test_a_template_bad_at_system_messages_works_without_them(template: str) -> None:
    chat = ChatFormat(with_template(template))
    assert (
        chat.tokenizer.decode(chat.first_prompt([Message("user", "q")]))
        == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ModelError, match="put its text into the first user message"):
        chat.first_prompt([Message("system", "be good"), Message("user", "q")])


def test_end_ids_come_from_template_tokenizer_and_generation_config() -> None:
    tokenizer = with_template(loop(CHATML))
    tokenizer.eos_token = "<|end|>"
    end, im_end = tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    assert ChatFormat(tokenizer).end_ids == tuple(sorted((end, im_end)))
    assert ChatFormat(tokenizer, GenerationConfig(eos_token_id=[3, im_end])).end_ids == tuple(
        sorted({3, end, im_end})
    )
    assert ChatFormat(tokenizer).end_of_turn_id == im_end


@given(plain)
def test_completion_and_text_are_inverses(text: str) -> None:
    chat = FORMATS["chatml"]
    ids = chat.completion(Message("assistant", text))
    assert ids[-1] in chat.end_ids
    assert chat.text(ids) == chat.text(ids[:-1]) == text


def test_a_character_without_a_token_is_refused_by_name() -> None:
    chat = ChatFormat(word_tokenizer(["Go"], 64))
    with pytest.raises(ModelError, match="'é'"):
        chat.first_prompt([Message("user", "Go to the café")])
    with pytest.raises(ModelError, match="'é'"):
        chat.continuation([Message("user", "Go to the café")], ended_with_stop=True)


def test_empty_conversations_are_refused() -> None:
    with pytest.raises(ModelError, match="at least one"):
        FORMATS["tiny"].first_prompt([])


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_policy_may_speak_again_after_its_own_answer(name: str) -> None:
    """Where the template has a place for that."""
    chat = FORMATS[name]
    history = [Message("user", "left?"), Message("assistant", "left")]
    try:
        whole = chat.first_prompt(history)
    except ModelError:
        with pytest.raises(ModelError):
            chat.continuation([], ended_with_stop=False)
        return

    after = chat.continuation([], ended_with_stop=False)
    assert whole[-len(after) :] == after
    assert chat.continuation([], ended_with_stop=True) == after[1:]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ModelError, match="not developer"):
        FORMATS["tiny"].continuation([Message("developer", "42")], ended_with_stop=True)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)  # may download
@pytest.mark.parametrize("cut", [False, True])
def test_smollm2_continues_by_its_template(smollm2_folder: Path, cut: bool) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(smollm2_folder))
    start = [Message("user", "Heads or tails? 12 coins")]
    turns = [
        ("<think>I say 3.</think><answer>heads</answer>", "  \n\n7 wrong"),
        ("Tails, then!", "Right."),
        ("", "go on"),
    ]
    assert played(chat, start, turns, cut=cut) == rendered(chat.tokenizer, dialogue(start, turns))
