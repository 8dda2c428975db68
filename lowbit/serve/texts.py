"""Answers of /v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

import base64
import struct
from typing import Any

from lowbit.serve.errors import refused
from lowbit.serve.schema import DetokenizeRequest, EmbeddingRequest, TokenizeRequest, prompts_of
from lowbit.serve.service import Service


async def embeddings(service: Service, params: EmbeddingRequest) -> dict[str, Any]:
    """Returns the embeddings of texts. They are computed one by one, so that steps of other requests run between them."""
    if service.adapter_of(params.model) is not None:
        raise refused("model", f"adapters compute no embeddings here: ask for {service.name!r}", "unsupported")
    prompts = await service.prompts.encoding(lambda: service.prompts.of_prompts(prompts_of(params.input)))
    data = []
    for index, ids in enumerate(prompts):
        values: Any = await service.worker.embed(ids, params.pooling or "last")
        if params.encoding_format == "base64":
            values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.name, "usage": usage}


async def tokenize(service: Service, params: TokenizeRequest) -> dict[str, Any]:
    """Returns the tokens of a text or a conversation, as vLLM's server does."""

    def encode() -> list[int]:
        if params.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in params.tools or ()]
            return service.prompts.of_conversation([message.for_template() for message in params.messages], tools or None)
        (ids,) = service.prompts.of_prompts([params.prompt or ""], params.add_special_tokens is not False)
        return ids

    ids = await service.prompts.encoding(encode)
    texts = [service.token_texts[token] for token in ids] if params.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.engine.max_length, "tokens": ids, "token_strs": texts}


async def detokenize(service: Service, params: DetokenizeRequest) -> dict[str, Any]:
    """Returns the text of tokens, as vLLM's server does."""

    def decode() -> str:
        (ids,) = service.prompts.of_prompts([params.tokens])
        return service.prompts.text_of(ids)

    return {"prompt": await service.prompts.encoding(decode)}
