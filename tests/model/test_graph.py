"""The recorded graphs of all families: every operation's result is as wide as its record says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.devices.graph import Evaluator, widths
from quire.devices.reference.backend import FORMULAS, ReferenceBackend, ReferenceStep
from quire.devices.step import StepAdapters
from tests.devices.native_cases import rows_step
from tests.model.test_stages import with_states
from tests.model.tiny_models import VARIANTS, make_model
from tests.models import load_model

FIRST = {family: variant for variant, (family, _) in reversed(VARIANTS.items())}


@pytest.mark.parametrize("variant", FIRST.values(), ids=FIRST)
def test_results_are_as_wide_as_their_records_say(variant: str, tmp_path: Path) -> None:
    make_model(variant).save_pretrained(tmp_path)
    model, seen = load_model(tmp_path, ReferenceBackend()), list[int]()

    def watched(formula: Any) -> Any:
        def compute(step: ReferenceStep, op: Any) -> Any:
            result = formula(step, op)
            seen.append(result.shape[1])
            return result

        return compute

    graph, spec = model.graph, model.spec.kv_spec("float32")
    evaluator = Evaluator(graph, {kind: watched(formula) for kind, formula in FORMULAS.items()})
    inputs = with_states(rows_step(3), spec)
    step = ReferenceStep(inputs, ReferenceBackend().kv_cache(spec, 3, 1, 1), StepAdapters({}, None))
    evaluator.logits(step, evaluator.hidden(step))
    assert seen == widths(graph, spec)
    assert seen[-1] == graph.vocab_size
