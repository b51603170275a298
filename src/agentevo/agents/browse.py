"""Summarises long results of tools with a helper model before the policy reads them.

The helper is a remote model: the models of `agent.browse.models` are tried in order until one
answers. Their requests and answers are recorded with the attempt's turns and never trained on. The
call's record has both the result and its summary. If no model answers, the policy reads the
original result with a note that no summary could be made, so a failure never looks like a summary.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from agentevo.agents.policy import Policy
from agentevo.agents.tools.tool import Condensed, ToolSpec
from agentevo.config.agents import BrowseSection
from agentevo.errors import AgentEvoError, storable
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import gather_all, in_thread
from agentevo.types import Message, ToolCall

PURPOSE = "Summarise the main content."
"""The purpose of reading a result if neither the call nor the recipe gives one."""
PURPOSE_KEYS = ("purpose", "goal")
"""The arguments of a call that can state its purpose."""
AGENT = "browse"
"""The agent name of the helper's turns in the attempt's record and the price log."""
LEFT_OUT = "\n[the rest is left out]"
FAILED = "[no summary could be made; this is what the tool gave]\n"
LONGEST_PURPOSE = 2000
CHARS_PER_TOKEN = 8
"""Only this many characters per token that the helper may read are tokenized to count tokens."""
CHARS_PER_REMOTE_TOKEN = 4
"""The characters per token if a remote model replaces the policy, since its tokenizer is not
available."""
_WHOLE = re.compile(r"\b(full|complete|raw|entire)\b[\w ]{0,20}\b(content|text|page)", re.I)
"""Matches a purpose that asks for the result itself."""


class Browse:
    """The helper of an agent, one object for a process."""

    def __init__(self, section: BrowseSection) -> None:
        self.section = section
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._has_reported = False

    def reader(self, policy: Policy) -> PageReader:
        """Creates the reader of pages for one attempt."""
        return PageReader(self, policy)

    async def clip_text(self, text: str, policy: Policy) -> tuple[str, bool]:
        """The part of a text that the helper reads, and whether the text is long."""
        section = self.section
        text = text.encode("utf-8", "replace").decode()
        if len(text.encode()) <= section.min_prompt_length:
            return text, False  # a token has at least one byte
        if policy.remote_model is not None:
            head = text[: section.max_prompt_length * CHARS_PER_REMOTE_TOKEN]
            is_long = len(text) > section.min_prompt_length * CHARS_PER_REMOTE_TOKEN
            return head + LEFT_OUT if len(head) < len(text) else text, is_long
        return await in_thread(self._clip_text, text, policy.conversation.chat.tokenizer)

    def _clip_text(self, text: str, tokenizer: Any) -> tuple[str, bool]:
        """Runs on a thread with its own tokenizer: another thread uses the policy's."""
        section = self.section
        head = text[: section.max_prompt_length * CHARS_PER_TOKEN]
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = copy.deepcopy(tokenizer)
            ids = self._tokenizer.encode(head, add_special_tokens=False)
            if len(ids) > section.max_prompt_length:
                head = self._tokenizer.decode(ids[: section.max_prompt_length])

        is_cut = len(head) < len(text)
        is_long = is_cut or len(ids) > section.min_prompt_length
        return head + LEFT_OUT if is_cut else text, is_long

    def report_failure(self, problems: list[str]) -> None:
        """Reports once in a process that no model could summarise."""
        if not self._has_reported:
            self._has_reported = True
            to_stderr(
                f"agent.browse: no model could summarise a result: {'; '.join(problems)}\n"
                "(the policy reads the original result with a note; later failures are counted)"
            )


class PageReader:
    """Summaries for one attempt. Calls may overlap."""

    def __init__(self, browse: Browse, policy: Policy) -> None:
        self._browse = browse
        self._policy = policy
        self._counts: Counter[str] = Counter()

    @property
    def metrics(self) -> dict[str, float]:
        names = ("num_summaries", "num_failed_summaries")
        return {name: float(self._counts[name]) for name in names}

    async def condense(self, spec: ToolSpec, call: ToolCall, text: str) -> Condensed | None:
        """The text that the policy reads in place of a tool's result; None if the result is not
        changed."""
        section = self._browse.section
        names = {call.name, *spec.names}
        if not any(
            fnmatchcase(name, browse_tool) for name in names for browse_tool in section.browse_tools
        ):
            return None

        purpose = self._purpose(spec, call)
        if _WHOLE.search(purpose):
            return None

        content, is_long = await self._browse.clip_text(text, self._policy)
        if not is_long:
            return None

        until = time.monotonic() + section.timeout_s
        pages = content.split(section.page_separator, section.max_pages - 1)
        read = await gather_all([self._read(page, purpose, until) for page in pages])
        if all(isinstance(summary, str) for summary in read):
            self._counts["num_summaries"] += 1
            heading = f"[a summary of {len(text):,} characters, made for: {purpose}]\n"
            return Condensed(text=heading + section.page_separator.join(map(str, read)))

        self._counts["num_failed_summaries"] += 1
        problems = [line for summary in read if not isinstance(summary, str) for line in summary]
        self._browse.report_failure(problems)

        if not any(isinstance(summary, str) for summary in read):
            return Condensed(text=FAILED + text, problem="; ".join(problems))

        parts = [
            summary if isinstance(summary, str) else FAILED + page
            for summary, page in zip(read, pages, strict=True)
        ]
        return Condensed(text=section.page_separator.join(parts), problem="; ".join(problems))

    def _purpose(self, spec: ToolSpec, call: ToolCall) -> str:
        """The purpose of the call: from its arguments, or from the recipe."""
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}

        for key in PURPOSE_KEYS:
            purpose = arguments.get(key) if isinstance(arguments, dict) else None
            if isinstance(purpose, str) and purpose.strip():
                return storable(purpose.strip()[:LONGEST_PURPOSE])

        defaults = self._browse.section.default_purpose
        return next(
            (defaults[name] for name in (call.name, *spec.names) if name in defaults), PURPOSE
        )

    async def _read(self, page: str, purpose: str, until: float) -> str | list[str]:
        """Requests a page's summary. Returns it, or the problem of each model."""
        section = self._browse.section
        # Not in one pass, so that a page that contains {purpose} is not changed.
        before, _, after = section.prompt.partition("{content}")
        prompt = "".join(
            (before.replace("{purpose}", purpose), page, after.replace("{purpose}", purpose))
        )
        problems = []
        for index, name in enumerate(section.models):
            share_s = (until - time.monotonic()) / (len(section.models) - index)
            try:
                async with asyncio.timeout(share_s):
                    reply = await self._policy.model(name, AGENT).generate(
                        [Message("user", prompt)]
                    )
            except TimeoutError:
                problems.append(f"{name}: no answer within {share_s:.1f} s")
                continue
            except AgentEvoError as error:
                problems.append(f"{name}: {error}")
                continue

            if reply.text.strip():
                return reply.text.strip()

            problems.append(f"{name}: its answer is empty")

        return problems
