"""A loopback server with the routes and fields of SGLang 0.5.23, over a real model.

What matters of SGLang's ways is kept: log-probs before truncation beside the sampling mask's, spans
of versions at the end of an answer, `retract` that leaves old keys and values in the prefix cache,
`ignore_eos` that ignores stop tokens too, a load that may fail halfway and leaves a mixture. Fields
that SGLang's types have not are refused.

    python sglang_server.py --model-path FOLDER --port N --config FILE ...
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLING = {
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "stop",
    "ignore_eos", "skip_special_tokens", "no_stop_trim", "sampling_seed",
}  # fmt: skip
FIELDS = {
    "/generate": {
        "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len",
        "top_logprobs_num", "stream", "return_sampling_mask", "sampling_logprobs_mode",
    },
    "/abort_request": {"rid", "abort_all"},
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    "/update_weights_from_disk": {"model_path", "weight_version", "flush_cache"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
}  # fmt: skip
MASK_TOKENS = 4096


@dataclass(eq=False)
class Asked:
    body: dict[str, Any]
    ids: list[int]
    out: list[int] = field(default_factory=list)
    plain: list[list[Any]] = field(default_factory=list)
    top: list[list[list[Any]]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    behaviour: list[Any] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    cache: Any = None
    finish: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any]:
        return self.body["sampling_params"]


class Sglang:
    """One server. `fail_loads` of the next loads break halfway; `flushes`: whether /flush_cache
    does what it says."""

    def __init__(self, folder: Path, *, api_key: str | None = None, admin: str | None = None):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.set_attn_implementation("eager")

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.api_key = api_key
        self.admin = admin
        self.label = "default"
        self.paused = False
        self.released = False
        self.running: dict[str, Asked] = {}
        self.prefixes: list[tuple[list[int], Any]] = []
        self.fail_loads = 0
        self.flushes = True
        self.seeded = True
        self.seen: list[tuple[str, Any]] = []

        self.app = FastAPI(openapi_url=None)
        for path in FIELDS:
            handler = getattr(self, path[1:])
            self.app.post(path)(self.checked(path, handler))

        self.app.post("/flush_cache")(self.checked("/flush_cache", self.flush_cache))
        self.app.get("/health")(lambda: Response())
        self.app.get("/server_info")(self.guarded(self.server_info))
        self.app.get("/model_info")(self.guarded(lambda: {"weight_version": self.label}))

    def guarded(self, handler: Any, level: str = "normal") -> Any:
        async def route(request: Request) -> Any:
            key = self.admin if level == "admin" and self.admin else self.api_key
            if key and request.headers.get("authorization") != f"Bearer {key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            return handler()

        return route

    def checked(self, path: str, handler: Any) -> Any:
        level = "normal" if path == "/generate" else "admin"

        async def route(request: Request) -> Any:
            if (refused := await self.guarded(lambda: None, level)(request)) is not None:
                return refused

            body = json.loads(await request.body() or b"{}")
            unknown = set(body) - FIELDS.get(path, set())
            unknown |= set(body.get("sampling_params", {})) - SAMPLING
            if unknown:
                return JSONResponse({"error": f"unknown field `{sorted(unknown)[0]}`"}, 400)

            self.seen.append((path, body))
            return await handler(body)

        return route

    def server_info(self) -> dict[str, Any]:
        longest = self.model.config.max_position_embeddings
        return {
            "version": "0.5.23",
            "max_req_input_len": longest - 6,
            "max_total_num_tokens": 100_000,
            "sampling_mask_max_tokens": MASK_TOKENS,
            "enable_deterministic_inference": self.seeded,
            "enable_memory_saver": True,
            "incremental_streaming_output": True,
            "api_key": "***",
        }

    async def generate(self, body: dict[str, Any]) -> Any:
        asked = Asked(body, list(body["input_ids"]))
        params = asked.params
        cut = body.get("return_sampling_mask", False)
        if cut and not 1 <= params.get("top_k", -1) <= MASK_TOKENS:
            return JSONResponse({"error": {"message": "return_sampling_mask needs top_k"}}, 400)
        assert not (params.get("min_p") and "sampling_seed" in params), "the scheduler ends"

        self.running[body["rid"]] = asked
        if body["stream"]:
            return StreamingResponse(self.pieces(asked), media_type="text/event-stream")

        while asked.finish is None:
            await asked.changed.wait()
            asked.changed.clear()

        return self.answer(asked, 0)

    async def pieces(self, asked: Asked) -> Any:
        done = 0
        while True:
            await asked.changed.wait()
            asked.changed.clear()
            answer = self.answer(asked, done)
            done = len(asked.out)
            yield f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"

            if asked.finish is not None:
                yield "data: [DONE]\n\n"
                return

    def answer(self, asked: Asked, done: int) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": asked.body["rid"], "finish_reason": asked.finish}
        meta |= {"weight_version": self.label, "completion_tokens": len(asked.out)}
        meta["output_token_logprobs"] = asked.plain[done:]
        if asked.body["top_logprobs_num"]:
            meta["output_top_logprobs"] = asked.top[done:]

        if asked.body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = asked.masks[done:]
            meta["output_token_sampling_logprobs"] = asked.behaviour[done:]

        if asked.finish is not None:
            spans: list[dict[str, Any]] = []
            for place, label in enumerate(asked.labels):
                if not spans or spans[-1]["version"] != label:
                    spans.append({"version": label, "start": place, "end": place})
                spans[-1]["end"] = place + 1
            meta["weight_versions"] = spans

        return {"text": "a\u2028b\x85", "output_ids": asked.out[done:], "meta_info": meta}

    async def schedule(self) -> None:
        while True:
            for rid, asked in list(self.running.items()):
                if self.paused or rid not in self.running:
                    break

                self.step(asked)
                if asked.finish is not None:
                    self.keep(asked)
                    del self.running[rid]

                asked.changed.set()
                await asyncio.sleep(0)

            # Requests last long enough to meet an update of the weights.
            await asyncio.sleep(0.001 if self.paused or not self.running else 0.002)

    def keep(self, asked: Asked) -> None:
        if asked.cache is not None:
            self.prefixes.append(([*asked.ids, *asked.out][: asked.cache.get_seq_length()],
                                  asked.cache))  # fmt: skip
            self.prefixes = self.prefixes[-20:]
        asked.cache = None

    @torch.no_grad()
    def step(self, asked: Asked) -> None:
        whole = [*asked.ids, *asked.out]
        if asked.cache is None:
            asked.cache = self.prefix_of(whole)

        held = asked.cache.get_seq_length() if asked.cache is not None else 0
        passed = self.model(
            input_ids=torch.tensor([whole[held:]]), past_key_values=asked.cache, use_cache=True
        )
        asked.cache = passed.past_key_values
        self.draw(asked, passed.logits[0, -1].float(), len(whole))

    def prefix_of(self, ids: list[int]) -> Any:
        best = 0
        found = None
        for known, cache in self.prefixes:
            same = next(
                (i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b),
                min(len(known), len(ids)),
            )
            if same > best:
                best = same
                found = cache

        if found is None or (best := min(best, len(ids) - 1)) < 8:
            return None

        found = copy.deepcopy(found)
        found.crop(best)
        return found

    def draw(self, asked: Asked, logits: torch.Tensor, position: int) -> None:
        params = asked.params
        greedy = params["temperature"] == 0
        logprobs = torch.log_softmax(logits / (1.0 if greedy else params["temperature"]), -1)
        probs, order = logprobs.exp().sort(descending=True)
        before = probs.cumsum(0) - probs
        kept = (torch.arange(len(probs)) < params.get("top_k", len(probs))) & (
            before <= params.get("top_p", 1.0)
        )
        kept &= probs >= probs[0] * params.get("min_p", 0.0)
        weights = probs * kept
        seed = (params.get("sampling_seed", 0) * 1_000_003 + position * 7919) % 2**63
        generator = torch.Generator().manual_seed(seed)
        place = 0 if greedy else int(torch.multinomial(weights, 1, generator=generator))
        token = int(order[place])
        asked.out.append(token)
        asked.labels.append(self.label)
        asked.plain.append([float(logprobs[token]), token, None])

        count = asked.body["top_logprobs_num"]
        asked.top.append([[float(logprobs[t]), int(t), None] for t in order[:count]])
        asked.masks.append(order[kept].tolist())
        behaviour = (weights[kept] / weights.sum()).log()
        full = asked.body.get("sampling_logprobs_mode") == "support"
        asked.behaviour.append(
            behaviour.tolist() if full else float(math.log(weights[place] / weights.sum()))
        )
        asked.finish = self.finish(asked, token)

    def finish(self, asked: Asked, token: int) -> dict[str, Any] | None:
        params = asked.params
        stops = {*params.get("stop_token_ids", []), self.tokenizer.eos_token_id}
        if not params["ignore_eos"] and token in stops:
            return {"type": "stop", "matched": token}

        tail = self.tokenizer.decode(asked.out[-80:])
        for text in params.get("stop", []):
            if text in tail:
                return {"type": "stop", "matched": text}

        if len(asked.out) >= params["max_new_tokens"]:
            return {"type": "length", "length": len(asked.out)}

        return None

    async def abort_request(self, body: dict[str, Any]) -> Any:
        for rid in list(self.running) if body.get("abort_all") else [body["rid"]]:
            if (asked := self.running.pop(rid, None)) is not None:
                asked.finish = {"type": "abort", "message": "Aborted"}
                asked.changed.set()
        return Response()

    async def pause_generation(self, body: dict[str, Any]) -> Any:
        assert body["mode"] == "retract"
        self.paused = True
        for asked in self.running.values():
            self.keep(asked)
        return {"status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> Any:
        self.paused = False
        return {"status": "ok"}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        return self.load(body)

    def load(self, body: dict[str, Any]) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)

        own = self.model.state_dict()
        for number, (name, one) in enumerate(tensors.items()):
            if self.fail_loads and number > len(tensors) // 2:
                self.fail_loads -= 1
                message = "Failed to update weights: on purpose"
                return JSONResponse({"success": False, "message": message}, 400)
            own[name].copy_(one)

        self.label = body["weight_version"]
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    async def flush_cache(self, body: dict[str, Any]) -> Any:
        if self.flushes:
            if self.running and not self.paused:
                return Response("Flush cache failed.", 400)
            self.prefixes.clear()
        return Response("Cache flushed.")

    async def release_memory_occupation(self, body: dict[str, Any]) -> Any:
        assert self.paused or not self.running, "should be called only when server is idle"
        self.released = True
        self.prefixes.clear()

    async def resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        self.released = False


async def serve(server: Sglang, port: int) -> None:
    running = uvicorn.Server(
        uvicorn.Config(server.app, host="127.0.0.1", port=port, log_level="warning", ws="none")
    )
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    steps = asyncio.ensure_future(server.schedule())
    serving = asyncio.ensure_future(running.serve())
    try:
        await asyncio.wait({steps, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.should_exit = running.force_exit = True
        steps.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--port", "--config", "--dtype"):
        parser.add_argument(name, required=True)
    for name in ("--max-running-requests", "--max-total-tokens"):
        parser.add_argument(name)
    for name in ("memory-saver", "deterministic-inference"):
        parser.add_argument(f"--enable-{name}", action="store_true")

    parser.add_argument("--incremental-streaming-output", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    key = Path(words.config).read_text().removeprefix("api-key: ").strip()
    server = Sglang(Path(words.model_path), api_key=key)
    server.seeded = words.enable_deterministic_inference
    print(f"ready at {time.time()}", flush=True)
    asyncio.run(serve(server, int(words.port)))


if __name__ == "__main__":
    main()
