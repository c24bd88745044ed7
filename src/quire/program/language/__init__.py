"""SGLang's language (0.5.23): programs of text, gen, select and fork, run inside the engine."""

from quire.program.language.endpoint import RuntimeEndpoint
from quire.program.language.expressions import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
    video,
)
from quire.program.language.function import Function, flush_cache, function, set_default_backend
from quire.program.language.runtime import Runtime
from quire.program.language.state import Group, State

__all__ = [
    "Function",
    "Group",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
