"""Transformers' own `generate`: what everything else is compared with."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from engine_probes.serve import serve


class Peer:
    """One checkpoint, as Transformers loads it."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, folder: str, dtype: str, threads: int) -> int:
        """Load the weights; the number of threads in use."""
        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        # Answers of a fixed length: nothing ends them early.
        self._model.generation_config.eos_token_id = None
        return torch.get_num_threads()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Greedy answers of exactly max_tokens, as one batch, prompts padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        config = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, generation_config=config)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": output[:, longest:].numel()}


if __name__ == "__main__":
    peer = Peer()
    serve({"load": peer.load, "generate": peer.generate})
