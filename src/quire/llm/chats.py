"""The methods of `LLM` that answer conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.client.outputs import OutputStream, RequestOutput
from quire.errors import RequestError
from quire.llm.prompts import Message, as_conversations, no_media
from quire.llm.running import Kwargs, RunningEngine, Sampling, Tqdm
from quire.text.output.parser import OutputParser
from quire.text.template import render


class ChatMethods(RunningEngine):
    """Answers to conversations."""

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template or the one given.

        `chat_template_content_format` is how the template wants content: "string", "openai" (a list of parts), or
        "auto": read from the template.
        """
        streams = self._conversations(
            messages,
            sampling_params,
            lora_request,
            priority,
            tokenization_kwargs,
            mm_processor_kwargs,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._run(streams, use_tqdm)

    def _conversations(
        self,
        messages: Sequence[Any],
        params: Sampling | None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
        **template: Any,
    ) -> list[OutputStream]:
        """Make the streams of conversations. `template` are options of `_chat_prompts`."""
        no_media(mm_processor_kwargs)
        prompts = self._chat_prompts(messages, **template)
        return self._whole(prompts, params, priority, tokenization_kwargs, lora_request)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        **options: Any,
    ) -> list[str]:
        """Begin to answer conversations, as `enqueue` does prompts. `options` as in `chat`."""
        return self._enqueue(self._conversations(messages, sampling_params, **options))

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt that `chat` computes for a conversation."""
        (prompt,) = self._chat_prompts(messages)
        tokens: list[int] = prompt["prompt_token_ids"]
        return tokens

    def switches_thinking(self) -> bool:
        """Tell whether the chat template has a variable that turns reasoning on or off."""
        return self._front.template is not None and self._front.template.switches_thinking

    def chat_prompt(
        self, messages: Sequence[Message], more: bool = False, variables: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], OutputParser, bool]:
        """Render the prompt of an answer, and make the parser that tells its reasoning from its content.

        With `more` the answer goes on with the last message. `variables` are the chat template's. Also returns whether
        special tokens mark the reasoning, so that the text must keep them.
        """
        (prompt,) = self._chat_prompts(
            messages,
            add_generation_prompt=not more,
            continue_final_message=more,
            chat_template_kwargs=variables,
        )
        form, rendered, tokenizer = self._front.reasoning, prompt["rendered"], self._front.tokenizer
        place = None if form is None else form.place(rendered.turn, rendered.continued)
        special = form is not None and tokenizer is not None and tokenizer.hides(form.markers)
        return prompt, OutputParser(None, form, None, place), special

    def _chat_prompts(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[dict[str, Any]]:
        """Render the prompts of one conversation or many. `chat_template_kwargs` prevail over the other variables."""
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        conversations = as_conversations(messages)
        template = None
        if chat_template is not None:
            if self._front.tokenizer is None:
                raise RequestError("chat needs a tokenizer: leave out skip_tokenizer_init", "messages")
            template = render.ChatTemplate.load(self._front.tokenizer, chat_template)
        prompts = []
        for conversation in conversations:
            rendered = self._front.render(
                conversation, template=template, content_format=chat_template_content_format, **options
            )
            tokens = self._front.encode(rendered.text, add_special_tokens=False)
            prompts.append({"prompt": rendered.text, "prompt_token_ids": tokens, "rendered": rendered})
        return prompts
