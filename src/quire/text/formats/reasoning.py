"""Formats of reasoning; the registry lists them."""

from quire.text.formats.shapes import Channels, ReasoningFormat, Recipients

FORMATS = (
    # gpt-oss: the channel `analysis` (harmony).
    ReasoningFormat("openai_gptoss", channels=Channels()),
    # Functionary v3.2: no reasoning, but answers name their recipient.
    ReasoningFormat("functionary_v32", recipients=Recipients(">>>", "all")),
    # Magistral and Ministral: reasoning tokens anywhere in the output.
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), anywhere=True),
    # Granite 3.2: sentences announce the reasoning and the response.
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    # Granite 3.3: think tags, and the response between tags.
    ReasoningFormat(
        "granite33", ("<think>",), ("</think>",), answer_begin=("<response>",), answer_end=("</response>",)
    ),
    # Seed-OSS: its own think tags.
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    # Gemma 4: the channel `thought`.
    ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",)),
    # Command R7B, Command A and later: markers around reasoning and response.
    ReasoningFormat(
        "cohere_command3",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer_begin=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        answer_end=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    # MiniMax M2 for clients that send reasoning back: it stays in the content, between its tags.
    ReasoningFormat("minimax_m2_append_think", ("<think>",), ("</think>",), opened=True, in_content=True),
    # MiniMax M3: its own think tags.
    ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",)),
    # Kimi k1.5, Kimi-VL Thinking and Kimi-Dev: tags of their own.
    ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",)),
    # K2 Horizon: tags by effort, opened by the prompt.
    ReasoningFormat(
        "k2_horizon",
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        opened=True,
    ),
    # Kimi K3: paired markers around reasoning, response and message.
    ReasoningFormat(
        "kimi_k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        answer_begin=("<|open|>response<|sep|>",),
        answer_end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    # Apriel: a sentence opens the reasoning, a marker ends it.
    ReasoningFormat(
        "apriel",
        ("Here are my reasoning steps:",),
        ("[BEGIN FINAL RESPONSE]",),
        answer_end=("[END FINAL RESPONSE]",),
    ),
    # LongCat-Flash-Thinking: its own think tags.
    ReasoningFormat("longcat", ("<longcat_think>",), ("</longcat_think>",)),
    # Apertus: inner text between markers.
    ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    # ERNIE 4.5 thinking: reasoning from the start, the response between tags.
    ReasoningFormat(
        "ernie45",
        ("<think>",),
        ("</think>",),
        opened=True,
        answer_begin=("<response>",),
        answer_end=("</response>",),
    ),
    # Hunyuan A13B: think tags, and the answer between tags.
    ReasoningFormat(
        "hunyuan_a13b", ("<think>",), ("</think>",), answer_begin=("<answer>",), answer_end=("</answer>",)
    ),
    # Qwen3 and most others: think tags, if the output or the prompt opens them.
    ReasoningFormat("qwen3", ("<think>",), ("</think>",)),
    # DeepSeek R1: reasoning from the start up to a tag.
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), opened=True),
)
