"""The protocol of SGLang's HTTP server, version 0.5.23: only this module names its routes, fields
and flags.

The server's behaviour, and its consequences for this module:

- Log-probs (`output_token_logprobs`) are after temperature and before top-k, top-p and min-p. If
  one of these is set, this module requests the sampling mask, whose log-probs are those of the
  sampling distribution. The mask needs a finite top_k. SGLang applies top_p before top_k, and
  AgentEvo after it: both together are refused.
- `ignore_eos` also ignores `stop_token_ids`, and without it every end-of-text token ends a request.
- Seeds count only under --enable-deterministic-inference, where min_p ends the whole server.
- `retract` leaves keys and values of the old weights in the prefix cache; /flush_cache drops them
  while paused, though requests wait. `flush_cache` of the update itself is false, so that a failed
  flush does not count as a failed load.
- A load that fails halfway is rolled back from the new path, not from the old one.
- `release_memory_occupation` ends the server unless it is paused or idle.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from agentevo.errors import EngineError, EngineUnavailableError
from agentevo.types import Alternatives, SamplingParams

OLDEST = (0, 5, 23)
MAX_STOPS = 32
KEEPALIVE_S = 2.0
"""The idle seconds after which the client closes a connection. The server closes it after 5, and a
request that is sent at that moment is lost."""
CONNECT_S = 10.0
RETRY_S = 0.2
CONTROL_S = 60.0
SHOWN = 300


class ServerFacts(NamedTuple):
    """The settings that a server reports."""

    longest: int
    """The most tokens of a sequence, prompt and answer together."""
    longest_prompt: int
    capacity: int
    mask_tokens: int
    """The most tokens of a sampling mask, which is the highest possible top_k."""
    seeded: bool
    can_sleep: bool
    incremental: bool
    """Whether each piece of a stream has only the new tokens."""


class SglangTokens(NamedTuple):
    """A piece of an answer."""

    ids: list[int]
    logprobs: list[float]
    top: list[Alternatives]
    labels: list[str]
    """The label of the weights of each token. Only the last piece has them."""
    finish: Mapping[str, Any] | None
    """`type`: stop, length or abort, and SGLang's other fields; None before the end."""


def launch_arguments(model: Path, host: str, port: int, facts: Mapping[str, Any]) -> list[str]:
    """The command-line arguments of a server. The keys are in `launch_config` instead."""
    words = ["--model-path", str(model), "--host", host, "--port", str(port)]
    words += ["--enable-memory-saver", "--incremental-streaming-output"]
    words += ["--enable-deterministic-inference"] if facts["seeded"] else []
    words += ["--max-running-requests", str(facts["max_running"])]
    if facts["kv_cache_tokens"] is not None:
        words += ["--max-total-tokens", str(facts["kv_cache_tokens"])]
    return [*words, "--dtype", facts["dtype"]]


def launch_config(api_key: str) -> str:
    """The content of the file for --config. It has the key, which must not be visible in the list
    of processes."""
    return f"api-key: {api_key}\n"


def why_unsupported(sampling: SamplingParams, facts: ServerFacts, seeded: bool) -> str:
    """Why SGLang does not support the sampling settings, or an empty text."""
    if sampling.penalties is not None:
        return "its penalties have another meaning than AgentEvo's: leave them out"
    if len(sampling.stop_strings) > MAX_STOPS:
        return f"stop_strings: it takes at most {MAX_STOPS}"
    if sampling.temperature == 0:
        return ""

    if seeded and sampling.min_p > 0:
        return (
            "min_p with seeds would end the server: use top_k or top_p, or set "
            "engine.options.seeded=false"
        )

    if sampling.top_k and sampling.top_p < 1:
        return (
            "top_k with top_p: it applies top_p to the whole distribution and not to what top_k "
            "leaves: set only one of them"
        )

    if sampling.top_k > facts.mask_tokens:
        return (
            f"top_k={sampling.top_k}: it returns log-probs of the sampling distribution for at "
            f"most {facts.mask_tokens} tokens: start it with --sampling-mask-max-tokens"
        )

    return ""


def _is_cut(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and bool(
        sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    )


def generate_body(
    rid: str,
    ids: list[int],
    sampling: SamplingParams,
    facts: ServerFacts,
    *,
    vocabulary: int,
    max_new_tokens: int,
    seeded: bool,
    stream: bool,
) -> dict[str, Any]:
    """The body of the request that continues these tokens."""
    cut = _is_cut(sampling)
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if cut:
        most_tokens = min(vocabulary, facts.mask_tokens)
        params |= {
            "top_k": min(sampling.top_k, vocabulary) or most_tokens,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }

    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        params["stop"] = list(sampling.stop_strings)
    if seeded:
        params["sampling_seed"] = (sampling.seed + 2**63) % 2**64 - 2**63

    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": sampling.top_logprobs if not cut else 0,
        "stream": stream,
    }
    if cut:
        body |= {
            "return_sampling_mask": True,
            "sampling_logprobs_mode": "support" if sampling.top_logprobs else "selected",
        }

    return body


def read_answer(
    answer: Mapping[str, Any],
    sampling: SamplingParams,
    facts: ServerFacts,
    vocabulary: int,
    *,
    done: int = 0,
) -> SglangTokens:
    """Reads an answer, or a piece of it. `done`: the number of its tokens that are known already.
    Raises EngineError for an answer that does not fit this module's request."""
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        ids = [int(token) for token in answer["output_ids"]]
        if finish is not None and finish["type"] == "abort" and not ids:
            return SglangTokens([], [], [], [], finish)

        logprobs, top = _numbers(meta, ids, sampling, facts, vocabulary)
        labels: list[str] = []
        if finish is not None:
            for span in meta["weight_versions"]:
                if span["start"] != len(labels):
                    raise ValueError("spans of versions with a gap")
                labels += [str(span["version"])] * (span["end"] - span["start"])

        if len(logprobs) != len(ids) or not all(-math.inf < logprob < 1e-3 for logprob in logprobs):
            raise ValueError("log-probs that are not one finite number per token")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"SGLang's answer can't be read ({type(error).__name__}: {error}): use version "
            f"{'.'.join(map(str, OLDEST))} or newer"
        ) from error

    return SglangTokens(ids[done:], logprobs[done:], top[done:], labels, finish)


def _numbers(
    meta: Mapping[str, Any],
    ids: list[int],
    sampling: SamplingParams,
    facts: ServerFacts,
    vocabulary: int,
) -> tuple[list[float], list[Alternatives]]:
    """The log-probs and alternatives under the sampling distribution."""
    count = sampling.top_logprobs
    if sampling.temperature == 0:
        return [0.0] * len(ids), [[(token, 0.0)] for token in ids] if count else []

    if not _is_cut(sampling):
        entries = meta["output_token_logprobs"]
        if [entry[1] for entry in entries] != ids:
            raise ValueError("log-probs of other tokens")
        rows = meta["output_top_logprobs"] if count else []
        top = [[(int(entry[1]), float(entry[0])) for entry in row[:count]] for row in rows]
        return [float(entry[0]) for entry in entries], top

    masks = meta["output_token_sampling_mask"]
    values = meta["output_token_sampling_logprobs"]

    most_tokens = min(vocabulary, facts.mask_tokens)
    if (
        not sampling.top_k
        and most_tokens < vocabulary
        and any(len(mask) >= most_tokens for mask in masks)
    ):
        raise EngineError(
            f"top_p or min_p keeps more than {most_tokens} tokens at some position, and SGLang "
            "returns log-probs for no more: set top_k, or start it with a higher "
            "--sampling-mask-max-tokens"
        )

    if not count:
        return [float(value) for value in values], []

    top = [
        sorted(zip(mask, row, strict=True), key=lambda pair: -pair[1])[:count]
        for mask, row in zip(masks, values, strict=True)
    ]
    chosen = [
        float(row[mask.index(token)]) for token, mask, row in zip(ids, masks, values, strict=True)
    ]
    return chosen, top


class SglangClient:
    """A client of one server. Belongs to one event loop. Its methods raise EngineError, and
    EngineUnavailableError if the server does not answer or the answer was lost."""

    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, ca_file: Path | None
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = _bearer(api_key)
        self._control = _bearer(admin_key or api_key)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
            verify=ssl.create_default_context(cafile=None if ca_file is None else str(ca_file)),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def facts(self) -> ServerFacts:
        """The server's settings. Raises EngineError for a server that this module does not
        support."""
        info = await self._ask("GET", "/server_info", timeout_s=CONTROL_S)
        try:
            release = tuple(map(int, re.findall(r"\d+", str(info["version"]))[:3]))
            if release < OLDEST:
                raise EngineError(
                    f"{self.url} is SGLang {info['version']}, which does not report the weights "
                    f"behind each token: install {'.'.join(map(str, OLDEST))} or newer"
                )

            longest_prompt = int(info["max_req_input_len"])
            return ServerFacts(
                longest=longest_prompt + 4,
                longest_prompt=longest_prompt - 1,
                capacity=int(info["max_total_num_tokens"]),
                mask_tokens=int(info["sampling_mask_max_tokens"]),
                seeded=bool(info["enable_deterministic_inference"]),
                can_sleep=bool(info["enable_memory_saver"]),
                incremental=bool(info["incremental_streaming_output"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/server_info is not SGLang's ({type(error).__name__}: {error})"
            ) from error

    async def ready(self) -> bool:
        """Whether the server answers and accepts requests."""
        try:
            answer = await self._http.get("/health", timeout=CONNECT_S)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def answers(
        self, body: Mapping[str, Any], deadline: float
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The pieces of a stream, or the single answer. A request is sent again only if no
        connection was made, so nothing is sampled twice. `deadline`: the time by the loop's clock
        until which to try."""
        while True:
            try:
                async with self._http.stream(
                    "POST", "/generate", json=dict(body), headers=self._headers
                ) as response:
                    if response.status_code != 200 or not body["stream"]:
                        yield _content(await response.aread(), response.status_code, "/generate")
                        return
                    async for line in _lines(response):
                        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                            yield _content(line[5:].strip(), 200, "/generate")

                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if asyncio.get_running_loop().time() + RETRY_S > deadline:
                    raise _lost(self.url, error) from error
                await asyncio.sleep(RETRY_S)
            except httpx.HTTPError as error:
                raise _lost(self.url, error) from error

    async def abort(self, rid: str) -> None:
        await self._post("/abort_request", {"rid": rid}, CONNECT_S)

    async def pause(self) -> None:
        """Pauses the server. Running requests are queued again, and compute their context again
        later."""
        await self._post("/pause_generation", {"mode": "retract"}, CONTROL_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, CONTROL_S)

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": False}
        answer = await self._post("/update_weights_from_disk", body, timeout_s)
        if answer.get("success") is not True:
            raise EngineError(f"SGLang has not loaded {folder}: {str(answer)[:SHOWN]}")

    async def relabel(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        answer = await self._post("/update_weight_version", body, CONTROL_S)
        if answer.get("success") is not True:
            raise EngineError(
                f"SGLang did not accept the label of the weights: {str(answer)[:SHOWN]}"
            )

    async def flush(self) -> None:
        """Drops all cached keys and values. Raises EngineError if that failed."""
        await self._post("/flush_cache", None, CONTROL_S)

    async def release_memory(self) -> None:
        await self._post("/release_memory_occupation", {"tags": ["kv_cache"]}, CONTROL_S)

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]}, CONTROL_S)

    async def _post(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        return await self._ask("POST", path, body, timeout_s=timeout_s)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> Mapping[str, Any]:
        try:
            response = await self._http.request(
                method,
                path,
                json=None if body is None else dict(body),
                headers=self._headers if method == "GET" else self._control,
                timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            )
        except httpx.HTTPError as error:
            raise _lost(self.url + path, error) from error

        return _content(response.content, response.status_code, path)


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _lost(where: str, error: Exception) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"{where}: SGLang's answer is lost ({type(error).__name__}: {error}): is it running?"
    )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an answer as they arrive. Only a line feed ends a line: httpx's own reader also
    ends lines at U+2028 within a text."""
    partial_line = bytearray()
    async for part in response.aiter_bytes():
        *lines, rest = part.split(b"\n")
        for line in lines:
            yield bytes(partial_line) + line
            partial_line.clear()
        partial_line += rest


def _content(raw: bytes, status: int, path: str) -> Mapping[str, Any]:
    """The JSON object of an answer. Raises EngineError if the server refused the request."""
    text = raw.decode("utf-8", "replace")
    if status in (401, 403):
        raise EngineError(
            f"SGLang's {path} refuses the key: set engine.options.api_key, or admin_api_key"
        )

    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError:
        content = {"text": text}

    content = content if isinstance(content, dict) else {"content": content}
    if status == 200 and "error" not in content:
        return content

    message = f"SGLang's {path} has answered {status}: {text[:SHOWN]}"
    raise EngineUnavailableError(message) if status in (502, 503, 504) else EngineError(message)
