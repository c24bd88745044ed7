"""The methods of `LLM` that make vectors: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from quire.client import vectors
from quire.client.adapters import with_adapter
from quire.client.requests import Front
from quire.client.scoring import ScoringRules, plan_scores
from quire.client.vectors import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    ScoringOutput,
    VectorRequestOutput,
)
from quire.errors import RequestError
from quire.fields import refusal
from quire.llm.prompts import Prompt, as_list, as_texts, tokens_of
from quire.llm.running import Kwargs, RunningEngine
from quire.params import PoolingParams
from quire.types import Pooling, Request

Params = PoolingParams | Sequence[PoolingParams]
BY_TOKEN = ("token_embed", "token_classify")
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
        """Return the model's raw vector for each text: an embedding, or a classifier's outputs before its softmax.

        With `pooling` "all", or a `pooling_task` that begins with token_, a vector for each token.
        """
        if pooling_task not in (None, "embed", "classify", "encode", "score", "reward", *BY_TOKEN):
            raise RequestError(
                f"pooling_task {pooling_task!r} is not supported: take embed, classify, token_embed, token_classify",
                "pooling_task",
            )
        pooling = "all" if pooling_task in BY_TOKEN else pooling
        texts = self._texts(prompts, tokenization_kwargs, None)
        requests = self._pooled(texts, _each(pooling_params, len(texts), pooling), lora_request)
        return [
            vectors.VectorRequestOutput(request.id, pooling_output(request, vector), request.tokens)
            for request, vector in zip(requests, self._compute(requests), strict=True)
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: Params | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Kwargs | None = None,
    ) -> list[VectorRequestOutput[PoolingOutput]]:
        """Return the outputs of a reward model for each text, or for each token if that is how it scores."""
        if self._front.info.scores is None:
            raise RequestError(f"{self.name} is not a reward model: it has no scores")
        return self.encode(prompts, pooling_params, use_tqdm, lora_request, "reward", tokenization_kwargs)

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
        """Return one vector per text, pooled as the model prescribes or by `pooling` (last, mean, cls)."""
        if self._front.info.scores is not None:
            raise RequestError(f"{self.name} is a classifier: use classify or score")
        texts = self._texts(prompts, tokenization_kwargs, truncate_prompt_tokens)
        each = _each(pooling_params, len(texts), pooling)
        found = []
        requests = self._pooled(texts, each, lora_request)
        if any(request.pooling == "all" for request in requests):
            raise RequestError("vectors of tokens are not one embedding: use encode", "pooling")
        for request, vector, params in zip(requests, self._compute(requests), each, strict=True):
            wanted = params.dimensions if dimensions is None else dimensions
            vectors.check_dimensions(wanted, len(vector), self._front.info.dimensions)
            output = vectors.EmbeddingOutput(vectors.shortened(vector, wanted))
            found.append(vectors.VectorRequestOutput(request.id, output, request.tokens))
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
        """Return the probabilities of a classifier's labels, per text; with use_activation=False its raw outputs."""
        info = self._front.info
        if info.scores is None:
            raise RequestError(f"{self.name} is not a classifier: it has no labels")
        texts = self._texts(prompts, tokenization_kwargs, truncate_prompt_tokens)
        each = _each(pooling_params, len(texts), None)
        found = []
        requests = self._pooled(texts, each, lora_request)
        if any(request.pooling == "all" for request in requests):
            raise RequestError(f"{self.name} classifies tokens, not texts: use encode", "pooling")
        for request, vector in zip(requests, self._compute(requests), strict=True):
            probs = vectors.probabilities(vector, info.scores if request.activate else None)
            output = vectors.ClassificationOutput(probs, info.labels[probs.index(max(probs))])
            found.append(vectors.VectorRequestOutput(request.id, output, request.tokens))
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
        """Score the second texts against the first: by a classifier of pairs with one output, or by the cosine of
        embeddings. A single first text is paired with every second one; otherwise both sides pair up in order.
        """
        if chat_template is not None:
            raise RequestError(
                "chat_template: texts are scored as they are, without a template", "chat_template"
            )
        options = dict(tokenization_kwargs or {})
        limit = options.pop("truncate_prompt_tokens", None)
        tokens_of(self._front, [0], options)  # refuses other options
        firsts, seconds = as_texts("data_1", data_1), as_texts("data_2", data_2)
        wanted = pooling_params.use_activation if isinstance(pooling_params, PoolingParams) else None
        activate = self._front.activates if wanted is None else wanted
        rules = ScoringRules(limit=limit, activate=activate)
        plan = plan_scores(self._front, self._new_id, firsts, seconds, rules)
        scores = plan.scores(self._compute(self._adapted(plan.requests, lora_request)))
        return [
            vectors.VectorRequestOutput(
                plan.requests[plan.pairs[i][-1]].id, vectors.ScoringOutput(score), plan.tokens(i)
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

    def _pooled(
        self, texts: Sequence[list[int]], each: Sequence[PoolingParams], lora_request: Any
    ) -> list[Request]:
        made = [
            pooled_request(self._front, self._new_id(), tokens, params, splits=True)
            for tokens, params in zip(texts, each, strict=True)
        ]
        return self._adapted(made, lora_request)

    def _adapted(self, requests: Sequence[Request], lora_request: Any) -> list[Request]:
        adapters, info = self._adapters_of(lora_request, len(requests)), self._front.info
        return [with_adapter(one, adapter, info) for one, adapter in zip(requests, adapters, strict=True)]


def pooling_output(request: Request, vector: list[float]) -> PoolingOutput:
    """Make the output of a text from its vector, or one per token."""
    return vectors.PoolingOutput(
        vectors.by_token(vector, len(request.tokens)) if request.pooling == "all" else vector
    )


def pooled_request(
    front: Front, request_id: str, tokens: list[int], params: PoolingParams, splits: bool = False
) -> Request:
    """Make the request for one vector; `splits` as in Front.pooled."""
    if params.task not in (None, *TASKS) or params.task == "plugin":
        raise RequestError(f"task {params.task!r} is not supported: take embed, classify or score", "task")
    kind = cast("Pooling | None", "all" if params.task in BY_TOKEN else params.pooling)
    return front.pooled(request_id, tokens, kind, activate=params.use_activation, splits=splits)


def _each(params: Params | None, count: int, pooling: Pooling | None) -> list[PoolingParams]:
    """Choose the parameters of each text; `pooling` prevails."""
    single = PoolingParams() if params is None else params
    each = [single] * count if isinstance(single, PoolingParams) else single
    if not isinstance(each, list | tuple) or not all(isinstance(one, PoolingParams) for one in each):
        raise refusal("pooling_params", params, "PoolingParams, or a list of them")
    if len(each) != count:
        raise RequestError(f"{count} prompts need as many PoolingParams, got {len(each)}", "pooling_params")
    if pooling is not None:
        each = [one.clone() for one in each]
        for one in each:
            one.pooling = pooling
    return list(each)
