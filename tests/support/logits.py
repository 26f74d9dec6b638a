"""Logits and tokens of a model folder by whichever transformers the environment has.

Request: {"model", "text", "out"}. Writes the logits to `out` (.npy, float32, positions x vocab).
"""

from __future__ import annotations

import sys
from typing import Any

from pipeline.models.child import child_main


def work(request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModelForCausalLM.from_pretrained(
        request["model"], torch_dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    tokens = tokenizer.encode(request["text"])
    messages = [{"role": "user", "content": "Name a colour."}]
    template = tokenizer.chat_template and tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    np.save(request["out"], logits.numpy())
    return {
        "transformers": transformers.__version__,
        "tokens": tokens,
        "chat": template,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": str(AutoModelForCausalLM.from_pretrained(request["model"], torch_dtype="auto").dtype),
        "generation": {
            key: getattr(model.generation_config, key)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
    }


if __name__ == "__main__":
    sys.exit(child_main(work, sys.argv))
