"""The fields of TGI's endpoints."""

from __future__ import annotations

from quire.serve.fields.shapes import Fields, Refused, Shape, names
from quire.serve.tgi.protocol import TgiRequest

PARAMETERS = Shape(
    {
        "max_new_tokens": "most tokens of output, 100 by default",
        "do_sample": "draw tokens; otherwise, and without the four below, the likeliest is taken",
        "temperature": "above 0",
        "top_k": "keep this many of the likeliest tokens",
        "top_p": "keep the smallest set of tokens with this probability",
        "seed": "the same seed gives the same text",
        "repetition_penalty": "divides the logits of tokens seen before",
        "frequency_penalty": "subtracted once per occurrence in the output",
        "stop": "texts that end the output, which keeps them",
        "best_of": "samples to draw; the one with the highest mean log-probability is returned",
        "return_full_text": "repeat the inputs before the output",
        "truncate": "keep this many tokens at the end of the inputs",
        "details": "return the tokens with their log-probabilities",
        "decoder_input_details": "and those of the inputs",
        "top_n_tokens": "and this many of the likeliest tokens",
        "grammar": "the form of the output: type json, regex or json_schema, and its value",
        "adapter_id": "the adapter to use, by its served name",
    },
    refused={
        "typical_p": Refused("this sampler is not implemented", (1, 1.0)),
        "watermark": Refused("watermarks are not implemented"),
        "max_tokens": Refused("use max_new_tokens"),
    },
    inner={"grammar": Shape(names("type value"))},
)

TGI_GENERATE = Fields(
    path="/generate",
    flag="--tgi-api",
    body=TgiRequest,
    taken={
        "inputs": "the text to continue",
        "parameters": "how tokens are drawn, and what is returned",
        "stream": "answer with server-sent events, as /generate_stream",
    },
    refused={"model": Refused("one model is served; name an adapter in parameters.adapter_id")},
    inner={"parameters": PARAMETERS},
)
