"""GPT-OSS's template ends an answer in one token as the last message and in another in a history:
what was drawn is kept, and nothing is written twice."""

from __future__ import annotations

import pytest
from harmony_template import HARMONY, MARKS
from hypothesis import given
from hypothesis import strategies as st

from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.turn_ends import end_of_turn_id
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.types import Message, ToolCall

USER = Message("user", "q")
AGAIN = Message("user", "again")
THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = " to=functions.f<|channel|>commentary json<|message|>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
plain = st.text(st.characters(codec="ascii", exclude_characters="<"), max_size=20)


def harmony_chat(template=HARMONY):
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(MARKS), "eos_token": "<|return|>"}
    )
    tokenizer.chat_template = template
    return ChatFormat(tokenizer)


CHAT = harmony_chat()
RETURN, END, CALLED = CHAT.tokenizer.convert_tokens_to_ids(["<|return|>", "<|end|>", "<|call|>"])


def ids_of(text):
    return CHAT.tokenizer.encode(text, add_special_tokens=False)


def test_an_answer_ends_in_return_or_call_and_a_thought_does_not_end_it():
    assert CHAT.end_of_turn_id == RETURN
    assert CHAT.end_ids == tuple(sorted((RETURN, CALLED)))
    with pytest.raises(ModelError, match="differently once another message follows"):
        end_of_turn_id(CHAT.tokenizer)
    assert CHAT.text([*ids_of(THOUGHT + FINAL + "yes"), RETURN]) == THOUGHT + FINAL + "yes"
    assert CHAT.opening == ""


@pytest.mark.slow
@given(plain, plain, st.booleans())
def test_the_pieces_are_what_the_template_renders_but_for_the_end_that_was_drawn(
    said, asked, is_cut
):
    history = [USER, Message("assistant", said), Message("user", asked)]
    whole = ids_of(
        CHAT.tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.text} for m in history],
            tokenize=False,
            add_generation_prompt=True,
        )
    )
    prompt = CHAT.first_prompt(history[:1])
    drawn = [*ids_of(FINAL + said), *([] if is_cut else [RETURN])]
    joined = prompt + drawn + CHAT.continuation(history[2:], ended_with_stop=not is_cut)
    place = len(prompt) + len(ids_of(FINAL + said))
    assert joined[place] == (END if is_cut else RETURN)
    assert [END if n == place else token for n, token in enumerate(joined)] == whole


def test_after_a_call_its_own_end_is_kept_and_the_result_follows():
    result = Message("tool", "3", tool_call_id="c", name="f")
    call = Message("assistant", "", (ToolCall("f", '{"a": 1}', "c"),))
    whole = ids_of(
        CHAT.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "3"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
    )
    drawn = [*ids_of(CALL + '{"a": 1}'), CALLED]
    joined = CHAT.first_prompt([USER]) + drawn + CHAT.continuation([result], ended_with_stop=True)
    assert joined == whole == CHAT.first_prompt([USER, call, result])
    assert CHAT.completion(call) == drawn


def test_demonstrations_are_what_the_policy_would_have_to_say():
    answer = Message("assistant", "yes")
    assert CHAT.completion(answer) == [*ids_of(FINAL + "yes"), RETURN]
    thought = Message("assistant", "yes", reasoning="so")
    assert CHAT.completion(thought) == [*ids_of(THOUGHT + FINAL + "yes"), RETURN]


def test_another_template_that_ends_only_its_last_message_so_is_refused_as_ever():
    other = (
        "{%- for m in messages -%}{{- '<|start|>' + m.role + '<|message|>' + m.content -}}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant<|message|>' -}}"
        "{%- endif -%}"
    )
    with pytest.raises(ModelError, match="differently once another message follows"):
        harmony_chat(other)
