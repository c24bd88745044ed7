"""Makes the Request of a program from steps as JSON has them, after every check that can be made before it runs.

Shared by `LLM` and the server. Knows text; no scheduler and no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.client.program_checks import DEFAULT_MAX_TOKENS, MAX_LANES, check_lane, check_size
from quire.client.requests import Front
from quire.errors import RequestError
from quire.fields import says
from quire.params import OutputKind, SamplingParams, StructuredOutputsParams
from quire.steps import AnyStep, Compute, Fork, Gen, If, InRole, Program, Reasoning, Repeat, Text, gens
from quire.types import Request

if TYPE_CHECKING:
    from quire.program.frames import Frames


class ProgramCall(msgspec.Struct, kw_only=True):
    """A program, or the next steps of one whose state was kept.

    `steps` belong to the first lane, `lanes` to the others, which only a `session` has. `sampling` has the defaults of
    all gens, by the fields of `Gen`. With `keep` the engine keeps the state; the last event names it.
    """

    steps: Annotated[list[AnyStep], says("the steps of the first lane")] = []
    lanes: Annotated[
        dict[str, list[AnyStep]],
        says("steps of other lanes of a session, by their names", max_length=MAX_LANES),
    ] = {}
    sampling: Annotated[dict[str, Any], says("defaults of all gens")] = {}
    session: (
        Annotated[str, says("go on from a state that was kept", pattern="^[0-9a-zA-Z_-]{1,128}$")] | None
    ) = None
    keep: Annotated[bool, says("keep the state after the call; the answer names its session")] = False
    stream: Annotated[bool | None, says("send events as they happen")] = False


def program_request(
    front: Front,
    request_id: str,
    call: ProgramCall,
    owner: str = "",
    priority: int = 0,
    salt: str = "",
    session: str = "",
) -> Request:
    """Check a program against the model and the bounds.

    A session belongs to its `owner`; a new one is named `session`, or a name is drawn. Raises RequestError naming the
    step at fault. Unless the front compiles grammars, the caller does, for each of `Request.gens`.
    """
    resume, stream = call.session is not None, bool(call.stream)
    if not call.steps and not resume:
        raise RequestError("the program has no steps: give at least one", "steps")
    if call.lanes and not resume:
        raise RequestError(
            "lanes are for a session: a new program has steps, and forks make its lanes", "lanes"
        )
    session = call.session or session or secrets.token_hex(16)
    lanes = {"": call.steps, **call.lanes} if call.steps or not call.lanes else call.lanes
    if front.tokenizer is None:
        raise RequestError("this engine has no tokenizer, which programs need", "steps")
    frames, defaults = front.frames, _defaults(call.sampling)
    check_size(lanes, defaults)
    made = {path: _framed(steps, frames, path == "" and not resume) for path, steps in lanes.items()}
    program = Program(lanes=made, session=f"{owner}/{session}", resume=resume, keep=call.keep, stream=stream)
    for steps in made.values():
        check_lane(steps, fresh=not resume)
    kind = OutputKind.DELTA if stream else OutputKind.FINAL_ONLY
    requests = []
    for number, gen in enumerate(gens(program)):
        params = _params(front, gen, defaults, f"gen {gen.name or number}")
        params = msgspec.structs.replace(params, output_kind=kind)
        requests.append(front.request(f"{request_id}/gen", [0], params, clamp=True))
    return Request(
        id=request_id,
        tokens=[],
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        max_tokens=1,
        priority=priority,
        salt=salt,
        arrival=time.time(),
        program=program,
        gens=tuple(requests),
    )


def _defaults(sampling: Mapping[str, Any]) -> Gen:
    try:
        return msgspec.convert({**sampling, "type": "gen"}, Gen)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling: {error}", "sampling") from error


def _framed(steps: Sequence[AnyStep], frames: Frames, first: bool, inside: bool = False) -> list[AnyStep]:
    """Replace each role by its frame; gens inside stop where the template ends a message."""
    found: list[AnyStep] = []
    for step in steps:
        if isinstance(step, InRole):
            if inside:
                raise RequestError("a role cannot be inside another: end it first", "steps")
            found.append(Text(text=frames.begin(step.role, first)))
            found += _framed(step.steps, frames, False, True)
            found.append(Text(text=frames.around[step.role][1]))
            first = False
        elif isinstance(step, Gen) and inside and frames.stop:
            stop = [step.stop] if isinstance(step.stop, str) else list(step.stop or ())
            found.append(msgspec.structs.replace(step, stop=[*stop, *frames.stop]))
        else:
            found.append(_framed_inside(step, frames, first, inside))
            first = first and isinstance(step, Compute)
    return found


def _framed_inside(step: AnyStep, frames: Frames, first: bool, inside: bool) -> AnyStep:
    if isinstance(step, Fork):
        branches = [_framed(part, frames, first, inside) for part in step.branches]
        return msgspec.structs.replace(step, branches=branches)
    if isinstance(step, If):
        then, otherwise = (_framed(part, frames, first, inside) for part in (step.then, step.otherwise))
        return msgspec.structs.replace(step, then=then, otherwise=otherwise)
    if isinstance(step, (Repeat, Reasoning)):
        return msgspec.structs.replace(step, steps=_framed(step.steps, frames, first, inside))
    return step


# --- gens


def _params(front: Front, gen: Gen, defaults: Gen, where: str) -> SamplingParams:
    given = {
        name: value
        for name in Gen.__struct_fields__
        if (value := getattr(gen, name)) is not None or (value := getattr(defaults, name)) is not None
    }
    given.pop("name", None)
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    regex, schema = given.pop("regex", None), given.pop("json_schema", None)
    if gen.regex is not None and gen.json_schema is not None:
        raise RequestError(f"{where}: give regex or json_schema, not both", "steps")
    scored, top = given.pop("return_logprob", False), given.pop("top_logprobs_num", 0)
    start = given.pop("logprob_start_len", -1)
    if scored:
        given["logprobs"] = top
        if start >= 0:
            given["prompt_logprobs"] = top
    try:
        if regex is not None or schema is not None:
            given["structured_outputs"] = StructuredOutputsParams(regex=regex, json=schema)
        return front.default_params(**given)
    except RequestError as error:
        raise RequestError(f"{where}: {error}", error.param) from error
