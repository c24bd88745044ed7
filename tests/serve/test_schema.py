"""Our own OpenAPI document: it is sound, and schemathesis finds no answer that it does not allow."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from quire.serve.app import ENDPOINTS
from tests.serve.running import Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


# Its steps hold steps: the library takes minutes to generate them. tests/serve/test_input.py sends it anything.
NESTED = "/v1/programs"


@pytest.fixture(scope="module")
def api(server: Server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [e.path for e in ENDPOINTS if e.path != NESTED])
def test_every_answer_is_one_that_the_document_allows(
    server: Server, api: BaseSchema, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=api[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=server.url, timeout=30, checks=CHECKS)

    check()


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/stats", "/v1/models"])
def test_what_takes_no_body(server: Server, api: BaseSchema, path: str) -> None:
    api[path]["GET"].Case().call_and_validate(base_url=server.url, timeout=30, checks=CHECKS)


def test_every_reference_leads_somewhere(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    paths = set(document["paths"])

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            found = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return found + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    for reference in references(document):
        assert reference.rpartition("/")[2] in schemas, reference
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
    } <= paths
    assert "prompt" in schemas["CompletionRequest"]["required"]
    fields = schemas["CompletionRequest"]["properties"]
    assert {"type": "null"} in fields["ignore_eos"]["anyOf"]
    assert {"type": "null"} not in fields["prompt"]["anyOf"]
