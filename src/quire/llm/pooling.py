"""The methods of `LLM` that make vectors: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from quire.client.front import Front
from quire.client.scoring import ScoringRules, plan_scores
from quire.client.vectors import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    ScoringOutput,
    VectorRequestOutput,
    probabilities,
    shortened,
)
from quire.errors import RequestError
from quire.llm.prompts import Prompt, as_list, no_adapter, tokens_of
from quire.llm.running import RunningEngine
from quire.params import PoolingParams
from quire.types import Pooling, Request

Kwargs = Mapping[str, Any]
Params = PoolingParams | Sequence[PoolingParams]
TASKS = ("embed", "classify", "score", "token_embed", "token_classify", "encode", "reward", "plugin")


class PoolingMethods(RunningEngine):
    """Vectors of texts."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Kwargs | None = None,
        *,
        pooling: Pooling | None = None,
    ) -> list[VectorRequestOutput[PoolingOutput]]:
        """The model's raw vector for each text: an embedding, or a classifier's outputs before its softmax."""
        if pooling_task not in (None, "embed", "classify", "encode", "score"):
            raise RequestError(
                f"pooling_task {pooling_task!r} is not supported: take embed, classify or none",
                "pooling_task",
            )
        no_adapter(lora_request)
        texts = self._texts(prompts, tokenization_kwargs, None)
        return self._vectors(texts, _each(pooling_params, len(texts), pooling))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: Params | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Kwargs | None = None,
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[VectorRequestOutput[EmbeddingOutput]]:
        """One vector per text, pooled as the model prescribes or by `pooling` (last, mean, cls)."""
        if self._front.info.scores is not None:
            raise RequestError(f"{self.name} is a classifier: use classify or score")
        no_adapter(lora_request)
        texts = self._texts(prompts, tokenization_kwargs, truncate_prompt_tokens)
        each = _each(pooling_params, len(texts), pooling)
        found = []
        for row, params in zip(self._vectors(texts, each), each, strict=True):
            wanted = params.dimensions if dimensions is None else dimensions
            if wanted is not None and not 1 <= wanted <= len(row.outputs.data):
                raise RequestError(f"dimensions must be from 1 to {len(row.outputs.data)}", "dimensions")
            vector = EmbeddingOutput(shortened(row.outputs.data, wanted))
            found.append(VectorRequestOutput(row.request_id, vector, row.prompt_token_ids))
        return found

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        tokenization_kwargs: Kwargs | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[VectorRequestOutput[ClassificationOutput]]:
        """Probabilities of a classifier's labels, per text; with use_activation=False its outputs as they are."""
        info = self._front.info
        if info.scores is None:
            raise RequestError(f"{self.name} is not a classifier: it has no labels")
        no_adapter(lora_request)
        texts = self._texts(prompts, tokenization_kwargs, truncate_prompt_tokens)
        each = _each(pooling_params, len(texts), None)
        found = []
        for row, params in zip(self._vectors(texts, each), each, strict=True):
            probs = probabilities(row.outputs.data, None if params.use_activation is False else info.scores)
            label = info.labels[probs.index(max(probs))]
            found.append(
                VectorRequestOutput(row.request_id, ClassificationOutput(probs, label), row.prompt_token_ids)
            )
        return found

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        pooling_params: Params | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Kwargs | None = None,
        chat_template: str | None = None,
    ) -> list[VectorRequestOutput[ScoringOutput]]:
        """Relevance of the second texts to the first: by a classifier of pairs with one output, or by the cosine of
        embeddings. A single first text is paired with every second one; otherwise both sides pair up in order.
        """
        no_adapter(lora_request)
        if chat_template is not None:
            raise RequestError(
                "chat_template: texts are scored as they are, without a template", "chat_template"
            )
        options = dict(tokenization_kwargs or {})
        limit = options.pop("truncate_prompt_tokens", None)
        tokens_of(self._front, [0], options)  # refuses other options
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        firsts = [data_1] if isinstance(data_1, str) else list(data_1)
        activate = not isinstance(pooling_params, PoolingParams) or pooling_params.use_activation is not False
        rules = ScoringRules(limit=limit, activate=activate)
        scoring = plan_scores(self._front, self._new_id, firsts, seconds, rules)
        scores = scoring.scores(self._compute(scoring.requests))
        return [
            VectorRequestOutput(
                scoring.requests[scoring.pairs[i][-1]].id, ScoringOutput(score), scoring.tokens(i)
            )
            for i, score in enumerate(scores)
        ]

    def _texts(
        self, prompts: Prompt | Sequence[Prompt], kwargs: Kwargs | None, limit: int | None
    ) -> list[list[int]]:
        options = dict(kwargs or {})
        if limit is not None:
            options["truncate_prompt_tokens"] = limit
        return [tokens_of(self._front, prompt, options)[1] for prompt in as_list(prompts)]

    def _vectors(
        self, texts: Sequence[list[int]], each: Sequence[PoolingParams]
    ) -> list[VectorRequestOutput[PoolingOutput]]:
        requests = [
            pooled_request(self._front, self._new_id(), tokens, params)
            for tokens, params in zip(texts, each, strict=True)
        ]
        vectors = self._compute(requests)
        return [
            VectorRequestOutput(request.id, PoolingOutput(vector), request.tokens)
            for request, vector in zip(requests, vectors, strict=True)
        ]


def pooled_request(front: Front, request_id: str, tokens: list[int], params: PoolingParams) -> Request:
    """The request for one vector."""
    if params.task not in (None, *TASKS) or params.task in ("token_embed", "token_classify", "plugin"):
        raise RequestError(f"task {params.task!r} is not supported: take embed, classify or score", "task")
    kind = cast("Pooling | None", params.pooling)
    return front.pooled(request_id, tokens, kind, activate=params.use_activation is not False)


def _each(params: Params | None, count: int, pooling: Pooling | None) -> list[PoolingParams]:
    """The parameters of each text; `pooling` prevails."""
    single = PoolingParams() if params is None else params
    each = [single] * count if isinstance(single, PoolingParams) else list(single)
    if len(each) != count:
        raise RequestError(f"{count} prompts need as many PoolingParams, got {len(each)}", "pooling_params")
    if pooling is not None:
        each = [one.clone() for one in each]
        for one in each:
            one.pooling = pooling
    return each
