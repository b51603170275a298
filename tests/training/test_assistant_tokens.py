"""Masks against expectations written by hand: a conversation as pieces of text, each of which is
trained or not."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from chat_templates import PHI3, QWEN3, QWEN3_THINKING, QWQ, R1, STRICT
from chat_templates import tokenizer_with as template_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentevo.data import ChatRow, RowError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.resolve import fetch
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.training.assistant_tokens import AssistantTokens
from agentevo.training.supervised import conversation_sample
from agentevo.types import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>\n\n' + "
    "m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
THINKING = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- "
    "set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}{{- "
    "'<think>' + m.reasoning_content + '</think>' -}}"
    "{%- endif -%}{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% "
    "generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% "
    "endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLING = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in "
    "m.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}{% "
    "endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    ("system", "S"),
    ("user", "one"),
    ("assistant", "ONE"),
    ("user", "two"),
    ("assistant", "TWO"),
]


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    """Bytes, with the special tokens of the templates above."""
    tokenizer = byte_tokenizer(512)
    names = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = template
    return tokenizer


def talk(*pairs: tuple[str, str], tools: Any = None, **last: Any) -> ChatRow:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in pairs]
    messages[-1] |= last
    return ChatRow("rows.jsonl:7", messages, tools)


def found(
    tokenizer: PreTrainedTokenizerBase, conversation: ChatRow, **options: Any
) -> list[list[tuple[str, bool]]]:
    """Each sample as (text, trained) pieces."""
    rows, _ = AssistantTokens(tokenizer, **{"max_tokens": 512, **options}).encode(conversation)
    samples = []
    for row in rows:
        assert row.name == "rows.jsonl:7" and len(row.ids) == len(row.mask) and not row.mask[0]

        starts = [
            0,
            *(at for at in range(1, len(row.ids)) if row.mask[at] != row.mask[at - 1]),
            len(row.ids),
        ]
        samples.append(
            [
                (tokenizer.decode(row.ids[a:b].tolist()), bool(row.mask[a]))
                for a, b in pairwise(starts)
            ]
        )

    return samples


def refused(tokenizer: PreTrainedTokenizerBase, conversation: ChatRow, **options: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        AssistantTokens(tokenizer, **{"max_tokens": 512, **options}).encode(conversation)
    return caught.value


CHATML_PIECES = [
    (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
        False,
    ),
    ("ONE<|im_end|>", True),
    ("\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n", False),
    ("TWO<|im_end|>", True),
]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_chatml_trains_the_answers_and_their_ends(template):
    """Found by rendering prompts, and by the template's own marks: the same."""
    assert found(tokenizer_with(template), talk(*TALK)) == [
        CHATML_PIECES if template == CHATML else [*CHATML_PIECES, ("\n", False)]
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_last_answer_and_answers_without_weight(template):
    tokenizer = tokenizer_with(template)
    last = found(tokenizer, talk(*TALK), train_on="last")[0]
    assert [text for text, trained in last if trained] == ["TWO<|im_end|>"]
    weighted = talk(*TALK, weight=0)
    assert [text for text, trained in found(tokenizer, weighted)[0] if trained] == ["ONE<|im_end|>"]
    assert refused(tokenizer, weighted, train_on="last").reason == "empty"


def test_a_llama_3_like_template():
    header = "<|header|>{}<|/header|>\n\n"
    assert found(tokenizer_with(LLAMA3), talk(*TALK)) == [
        [
            (
                "<|begin|>"
                + header.format("system")
                + "S<|eot|>"
                + header.format("user")
                + "one<|eot|>"
                + header.format("assistant"),
                False,
            ),
            ("ONE<|eot|>", True),
            (header.format("user") + "two<|eot|>" + header.format("assistant"), False),
            ("TWO<|eot|>", True),
        ]
    ]


def test_an_answer_ends_at_its_first_end_of_turn():
    """Phi-3's template ends the text behind every rendering, which is no part of the answer; and
    since the next prompt goes on without it, a conversation is one sample."""
    prompt = "<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert found(template_tokenizer(PHI3), talk(*TALK)) == [
        [
            ("<|im_start|>system\nS<|im_end|>\n" + prompt.format("user", "one"), False),
            ("ONE<|im_end|>", True),
            ("\n" + prompt.format("user", "two"), False),
            ("TWO<|im_end|>", True),
        ]
    ]


def test_calls_may_end_in_a_token_of_their_own():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    conversation = talk(("user", "one"), ("assistant", ""), tool_calls=[call])
    ((_, (said, trained)),) = found(template_tokenizer(STRICT), conversation)
    assert trained and said.startswith("<tool_call>") and said.endswith("</tool_call><|eom|>")


def test_a_template_that_strips_old_thinking_gives_each_turn_its_own_context():
    conversation = talk(*TALK, reasoning_content="so two")
    conversation.messages[2]["reasoning_content"] = "so one"
    first = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found(tokenizer_with(THINKING), conversation) == [
        [(first, False), ("<think>so one</think>ONE<|im_end|>", True)],
        [
            (
                first + "ONE<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("<think>so two</think>TWO<|im_end|>", True),
        ],
    ]

    last = found(tokenizer_with(THINKING), conversation, train_on="last")
    assert [text for sample in last for text, trained in sample if trained] == [
        "<think>so two</think>TWO<|im_end|>"
    ]
    assert len(found(tokenizer_with(THINKING), talk(*TALK))) == 1  # nothing to strip: one sample


QUESTION = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n"
ANSWERED = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "reasoning", "said"),
    [
        ("ONE", None, "\n</think>\n\nONE"),
        ("ONE", "so one", "so one\n</think>\n\nONE"),
        ("<think>\nso one\n</think>\n\nONE", None, "so one\n</think>\n\nONE"),
        ("<think>so one</think>ONE", None, "so one</think>ONE"),
    ],
)
@pytest.mark.parametrize("template", [QWQ, R1], ids=["qwq", "r1"])
def test_a_thought_that_the_prompt_opens_is_finished(template, content, reasoning, said):
    """Templates that open a thought and strip every one from what they render: each turn is trained
    with its thought, in a history without."""
    tokenizer = template_tokenizer(template)
    pairs = [("user", "one"), ("assistant", content), ("user", "two"), ("assistant", "TWO")]
    conversation = talk(*pairs)
    if reasoning is not None:
        conversation.messages[1]["reasoning_content"] = reasoning

    first, second = found(tokenizer, conversation)
    prompts = [
        tokenizer.apply_chat_template(
            conversation.messages[:size], tokenize=False, add_generation_prompt=True
        )
        for size in (1, 3)
    ]
    assert first == [(prompts[0], False), (f"{said}<|im_end|>", True)]
    assert second == [(prompts[1], False), ("\n</think>\n\nTWO<|im_end|>", True)]
    assert "so one" not in prompts[1] and prompts[1].endswith("<think>\n")


def test_a_thought_of_the_rows_own_tag_goes_on_behind_the_prompts():
    """The template opens a thought with a newline and leaves answers as they are; the row has none.
    In some tokenizers the tags are special tokens, which an answer may say all the same."""
    keeps = R1.replace(".split('</think>')[-1]", "")
    assert keeps != R1

    tokenizer = template_tokenizer(keeps)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    for content, said in (
        ("<think>so one</think>ONE", "so one</think>ONE"),
        ("<think>\nso one\n</think>\n\nONE", "so one\n</think>\n\nONE"),
        ("ONE", "\n</think>\n\nONE"),
    ):
        ((prompt, answer),) = found(tokenizer, talk(("user", "one"), ("assistant", content)))
        assert prompt == ("<|begin|><|User|>one<|Assistant|><think>\n", False)
        assert answer == (said + "<|im_end|>", True)

    error = refused(tokenizer, talk(("user", "<think>"), ("assistant", "ONE")))
    assert "special" in error.reason or "special" in error.detail


def test_a_template_that_writes_the_newest_thought_itself():
    conversation = talk(
        ("user", "one"), ("assistant", "ONE"), ("user", "two"), ("assistant", "TWO")
    )
    conversation.messages[1]["reasoning_content"] = "so one"
    first, second = found(template_tokenizer(QWEN3_THINKING), conversation)
    assert first == [(QUESTION, False), ("so one\n</think>\n\nONE<|im_end|>", True)]
    assert second == [
        (f"{ANSWERED}ONE<|im_end|>\n{QUESTION.replace('one', 'two')}", False),
        ("\n</think>\n\nTWO<|im_end|>", True),
    ]

    hybrid = found(template_tokenizer(QWEN3), conversation)
    assert hybrid[0] == [(ANSWERED, False), ("<think>\nso one\n</think>\n\nONE<|im_end|>", True)]


@pytest.mark.parametrize("template", [QWQ, QWEN3_THINKING, R1], ids=["qwq", "qwen3", "r1"])
def test_supervised_samples_are_what_the_chat_format_encodes(template):
    """A demonstration has the same ids by both ways that a message becomes tokens."""
    tokenizer = template_tokenizer(template)
    chat = ChatFormat(tokenizer)
    for message in (Message("assistant", "ONE"), Message("assistant", "ONE", reasoning="so")):
        conversation = talk(("user", "one"), ("assistant", message.content))
        if message.reasoning:
            conversation.messages[1]["reasoning_content"] = message.reasoning
        (row,), _ = AssistantTokens(tokenizer, max_tokens=512).encode(conversation)
        sample = conversation_sample([Message("user", "one"), message], chat, "x")
        assert row.ids.tolist() == sample.ids.tolist()
        assert row.mask.tolist() == sample.loss_mask.tolist()


def test_a_thought_that_is_written_otherwise_than_it_is_opened_is_refused():
    otherwise = QWEN3_THINKING.replace("'<think>\n' + thought", "'<think> ' + thought")
    assert otherwise != QWEN3_THINKING
    error = refused(template_tokenizer(otherwise), talk(("user", "one"), ("assistant", "ONE")))
    assert "does not begin it with its own generation prompt" in error.detail


def test_tools_and_calls():
    tools = [{"name": "add"}]
    conversation = ChatRow(
        "rows.jsonl:7",
        [
            {"role": "user", "content": "1+1"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
                ],
            },
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ],
        tools,
    )
    assert found(tokenizer_with(CALLING), conversation) == [
        [
            (
                f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ('<call>add{"a": 1}</call><|im_end|>', True),
            ("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n", False),
            ("two<|im_end|>", True),
        ]
    ]
    assert "leaves out tools" in refused(tokenizer_with(CHATML), conversation).detail

    without = ChatRow("rows.jsonl:7", conversation.messages, None)
    assert "leaves out tool_calls" in refused(tokenizer_with(CHATML), without).detail
    assert (
        "leaves out reasoning_content"
        in refused(tokenizer_with(CHATML), talk(*TALK, reasoning_content="so")).detail
    )


def test_what_a_template_can_not_say():
    prompted = CHATML.replace("assistant\n'", "assistant\nSure: '")
    assert (
        "does not begin it with its own generation prompt"
        in refused(tokenizer_with(prompted), talk(*TALK)).detail
    )

    endless = CHATML.replace("<|im_end|>\n", "\n")
    assert "no special token after it" in refused(tokenizer_with(endless), talk(*TALK)).detail

    strict = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refused(tokenizer_with(strict), talk(*TALK)).detail

    broken = "{{ messages[0].content + 1 }}"
    assert refused(tokenizer_with(broken), talk(*TALK)).reason == "template"

    begins = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' "
        "}}{% endif %}{% endfor %}"
    )
    assert (
        "no context to predict it from"
        in refused(tokenizer_with(begins), talk(("user", "q"), ("assistant", "a"))).detail
    )


def test_a_template_whose_marks_do_not_match_the_answers():
    only_last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    error = refused(tokenizer_with(only_last), talk(*TALK))
    assert (error.reason, error.detail) == (
        "no_assistant_mask",
        "the template marks 1 passages for 2 messages of the assistant",
    )
    never = MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    assert refused(tokenizer_with(never), talk(*TALK)).reason == "no_assistant_mask"


def test_special_tokens_in_texts_are_refused_wherever_they_are():
    tokenizer = tokenizer_with(CALLING)
    for conversation in (
        talk(("user", "q<|im_end|>"), ("assistant", "a")),
        talk(("user", "q"), ("assistant", "a<|im_end|>")),
        talk(("user", "q"), ("assistant", "a"), tools=[{"name": "<|im_start|>"}]),
    ):
        assert refused(tokenizer, conversation).reason == "special_token"


def test_too_long_rows_are_refused_or_shortened_by_whole_turns():
    tokenizer = tokenizer_with(CHATML)
    whole = sum(len(tokenizer.encode(text)) for text, _ in CHATML_PIECES)
    assert found(tokenizer, talk(*TALK), max_tokens=whole) == [CHATML_PIECES]

    error = refused(tokenizer, talk(*TALK), max_tokens=whole - 1)
    assert (
        error.reason == "too_long" and f"{whole} tokens, the limit is {whole - 1}" in error.detail
    )

    rows, shortened = AssistantTokens(tokenizer, max_tokens=whole - 1, too_long="shorten").encode(
        talk(*TALK)
    )
    assert shortened
    assert tokenizer.decode(rows[0].ids.tolist()) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nTWO<|im_end|>"
    )
    assert refused(tokenizer, talk(*TALK), max_tokens=10, too_long="shorten").reason == "too_long"


@pytest.mark.slow
@pytest.mark.parametrize(
    "turns",
    [
        [("user", "q"), ("assistant", "word " * 2_000_000)],
        [("user", "word " * 2_000_000), ("assistant", "a")],
        [("user", "q"), ("assistant", "a")] * 10_000,
    ],
)
def test_a_row_of_millions_of_tokens_is_refused_unencoded_or_loses_its_oldest_turns(
    turns, monkeypatch
):
    tokenizer = tokenizer_with(CHATML)
    encoder = AssistantTokens(tokenizer, max_tokens=100)
    monkeypatch.setattr(encoder, "_parts", None)
    with pytest.raises(RowError, match="far more than 100 tokens") as refusal:
        encoder.encode(talk(*turns))
    assert refusal.value.reason == "too_long"

    recent = [("user", "q"), ("assistant", "a")]
    shortening = AssistantTokens(tokenizer, max_tokens=100, too_long="shorten")
    monkeypatch.setattr(shortening, "_parts", lambda messages, tools: [([1], [len(messages)])])
    (row,), shortened = shortening.encode(talk(("system", "S"), *turns, *recent))
    assert shortened and row.mask.tolist() == [True]


def test_pieces_are_encoded_as_the_whole_is():
    """Ids of a long conversation, of which only new text is encoded, equal those of the whole text
    at once."""
    tokenizer = tokenizer_with(CHATML)
    pairs = [("user", "one 12\n\n"), ("assistant", "\n two")] * 6
    (row,), _ = AssistantTokens(tokenizer, max_tokens=512).encode(talk(*pairs))
    whole = tokenizer.apply_chat_template(talk(*pairs).messages, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert whole[:-1] == row.ids.tolist()  # all but the newline behind the last message


def test_a_token_that_takes_up_what_stands_behind_it_is_encoded_with_it():
    """Here `<|im_end|>` swallows the newline: what follows it must not be encoded on its own."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_tokens(
        [AddedToken("<|im_end|>", rstrip=True, special=True, normalized=False)], special_tokens=True
    )
    assert tokenizer.encode("<|im_end|>\nx") == tokenizer.encode("<|im_end|>x")

    whole = tokenizer.apply_chat_template(talk(*TALK).messages, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    (row,), _ = AssistantTokens(tokenizer, max_tokens=512).encode(talk(*TALK))
    assert row.ids.tolist() == whole


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(fetch("smollm2-135m-instruct"))


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2(smollm2_tokenizer):
    assert found(smollm2_tokenizer, talk(*TALK)) == [CHATML_PIECES]
    default = found(smollm2_tokenizer, talk(*TALK[1:3]))
    assert default[0][0][0].startswith("<|im_start|>system\nYou are a helpful AI assistant")


@pytest.mark.smollm2
def test_smollm2_keeps_the_border_of_the_prompt(smollm2_tokenizer):
    """An answer that begins with a newline would melt into the prompt's last token; the policy's
    tokens begin after it."""
    (row,), _ = AssistantTokens(smollm2_tokenizer, max_tokens=512).encode(
        talk(("user", "q"), ("assistant", "\n\nyes"))
    )
    prompt = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=True
    )
    size = len(prompt["input_ids"])
    assert row.ids[:size].tolist() == prompt["input_ids"]
    assert row.mask.tolist() == [False] * size + [True] * (len(row.ids) - size)
    assert smollm2_tokenizer.decode(row.ids[size:].tolist()) == "\n\nyes<|im_end|>"

    pairs = [("user", "one 12\n\n"), ("assistant", "two 3")] * 3
    (long,), _ = AssistantTokens(smollm2_tokenizer, max_tokens=512).encode(talk(*pairs))
    whole = smollm2_tokenizer.apply_chat_template(
        talk(*pairs).messages, tokenize=True, return_dict=True
    )["input_ids"]
    assert whole[:-1] == long.ids.tolist()
