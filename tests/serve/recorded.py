"""Requests of coding agents and chat interfaces, as their published code sends them, with shortened texts."""

from __future__ import annotations

from typing import Any

MODEL = "quire-stories"

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12, "description": "The command to run"}},
    "required": ["command"],
    "additionalProperties": False,
}
PATH = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"enum": ["a.txt", "b.txt"]},
        "limit": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["path"],
    "additionalProperties": False,
}
PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""

# Codex CLI, codex-rs/core/src/client.rs: the Responses API, nothing stored.
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox: read-only."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs it.",
            "strict": False,
            "parameters": COMMAND,
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199c2e4-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "00000000-0000-4000-8000-000000000000"},
}
CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "session_id": "0199c2e4",
    "OpenAI-Beta": "responses=experimental",
}

# Claude Code: the Messages API with betas. CLAUDE_CODE_MAX_OUTPUT_TOKENS sets max_tokens.
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "system": [
        {
            "type": "text",
            "text": "You are an agent for the terminal.",
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "system", "content": "Today is Tuesday."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"},
                {"type": "text", "text": "Read a file.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": PATH, "eager_input_streaming": True},
        {"name": "Bash", "description": "Runs.", "input_schema": COMMAND, "defer_loading": False},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
}


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters, **more},
    }


# Open WebUI, backend/open_webui/routers/openai.py, with native function calling.
OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be helpful."},
        {"role": "user", "content": "Look at a file."},
    ],
    "tools": [function("read_file", PATH)],
    "stream_options": {"include_usage": True},
    "user": {"id": "1", "name": "Ann", "role": "admin"},
}
OPEN_WEBUI_TITLE: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Generate a title."}],
    "stream": False,
    "max_completion_tokens": 20,
    "metadata": {"task": "title_generation", "chat_id": "c", "task_body": {"messages": []}},
}

# Cline, src/core/api/providers/openai.ts, with native tool calls.
CLINE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>Read.</task>"},
                {"type": "text", "text": "<environment_details>None</environment_details>"},
            ],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
    "tools": [function("read_file", PATH, strict=False), function("execute_command", COMMAND, strict=False)],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
}

# Continue, packages/openai-adapters and core/llm: chats, and completions for the editor.
CONTINUE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are in agent mode."},
        {"role": "user", "content": [{"type": "text", "text": "Read a file."}]},
    ],
    "max_tokens": 200,
    "temperature": 0.01,
    "stop": ["<end>", "</s>"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [function("builtin_read_file", PATH)],
    "parallel_tool_calls": False,
    "prediction": None,
    "reasoning_effort": None,
}
CONTINUE_EDITOR: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time there was a",
    "suffix": None,
    "max_tokens": 20,
    "temperature": 0.01,
    "top_p": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "stop": ["\n\n", "/src/"],
    "stream": True,
}

# OpenCode, through the AI SDK's provider of chats: several results after one another, null content.
OPENCODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32,
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": "Read two files."},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Two files.",
            "tool_calls": [
                {
                    "id": f"call_{name}",
                    "type": "function",
                    "function": {"name": "read", "arguments": arguments},
                }
                for name, arguments in (("a", '{"path":"a.txt"}'), ("b", '{"path":"b.txt"}'))
            ],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "one"},
        {"role": "tool", "tool_call_id": "call_b", "content": ""},
    ],
    "tools": [function("read", PATH), function("bash", COMMAND)],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}

# Goose, crates/goose/src/providers/formats/openai.rs: empty text beside calls.
GOOSE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32,
    "messages": [
        {"role": "system", "content": "You are goose."},
        {"role": "user", "content": "List."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "developer__shell", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.txt"}]},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [function("developer__shell", COMMAND)],
    "stream": True,
    "stream_options": {"include_usage": True},
}

# Zed, crates/open_ai: parts as content, no text beside calls, a description that is absent.
ZED: dict[str, Any] = {
    "model": MODEL,
    "max_completion_tokens": 32,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are Zed."}]},
        {"role": "user", "content": [{"type": "text", "text": "Read."}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "read_file", "arguments": '{"path":"a.txt"}'},
                }
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
    ],
    "tools": [{"type": "function", "function": {"name": "read_file", "parameters": PATH}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "stop": [],
    "stream": True,
}

# Codex with MCP servers: namespaces, tools that come as an item, and those that OpenAI runs.
CODEX_MCP: dict[str, Any] = {
    **CODEX,
    "input": [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [{"type": "function", "name": "wait", "strict": False, "parameters": COMMAND}],
        },
        *CODEX["input"],
    ],
    "tools": [
        *CODEX["tools"],
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [
                {
                    "type": "function",
                    "name": "read",
                    "description": "Reads.",
                    "strict": False,
                    "parameters": PATH,
                }
            ],
        },
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png", "size": "auto"},
        {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": COMMAND},
        {
            "type": "mcp",
            "server_label": "docs",
            "server_url": "https://example.com",
            "require_approval": "never",
        },
        {"type": "apply_patch"},
        {"type": "shell", "environment": {"type": "local"}},
    ],
}

# A session that another model began, and that Codex goes on with.
CODEX_RESUMED: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look around."}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAAA"},
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_1",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "timeout_ms": 1000, "env": {}},
    },
    {"type": "local_shell_call_output", "id": "lsh_2", "call_id": "call_1", "output": "a.txt"},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "docs",
        "name": "find",
        "arguments": '{"q":"x"}',
        "output": "found it",
    },
    {
        "type": "function_call",
        "call_id": "call_2",
        "namespace": "mcp__files",
        "name": "read",
        "arguments": "{}",
    },
    {"type": "function_call_output", "call_id": "call_2", "output": ""},
    {
        "type": "apply_patch_call",
        "call_id": "call_3",
        "operation": {"type": "update_file", "path": "a.txt", "diff": "+b"},
        "status": "completed",
    },
    {"type": "apply_patch_call_output", "call_id": "call_3", "status": "completed", "output": "patched"},
    {
        "type": "shell_call_output",
        "call_id": "call_4",
        "output": [{"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="},
    {"type": "compaction", "encrypted_content": "gAAAAA"},
    {"type": "item_reference", "id": "msg_1"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Done.", "annotations": []}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
]

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};"

# Claude Code, a later turn of a session that Anthropic's own server began.
CLAUDE_CODE_RESUMED: dict[str, Any] = {
    **CLAUDE_CODE,
    "system": [{"type": "text", "text": BILLING.format("0a1b2")}, *CLAUDE_CODE["system"]],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look it up."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A search.", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "EmwK"},
                {
                    "type": "server_tool_use",
                    "id": "srvtoolu_1",
                    "name": "web_search",
                    "input": {"query": "q"},
                },
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "srvtoolu_1",
                    "content": [
                        {"type": "web_search_result", "title": "A page", "url": "u", "encrypted_content": "E"}
                    ],
                },
                {"type": "text", "text": "Found."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [
                        {"type": "text", "text": "row 1: 10"},
                        {"type": "text", "text": "20 is row 2"},
                    ],
                },
                {
                    "type": "document",
                    "title": "Notes",
                    "source": {"type": "text", "media_type": "text/plain", "data": "Remember."},
                },
                {
                    "type": "search_result",
                    "source": "https://example.com",
                    "title": "A result",
                    "content": [{"type": "text", "text": "It says so."}],
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [
        *CLAUDE_CODE["tools"],
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10000},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1024, "display_height_px": 768},
    ],
}
