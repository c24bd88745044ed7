"""Operations without a kernel, computed by their formulas over a device's cache."""

from __future__ import annotations

import numpy as np
import pytest

from quire import LLM
from tests.model import test_encoders as encoders

pytest.importorskip("triton", reason="the kernels of GPUs need triton")


make = encoders.make


def test_scores_by_distance_make_the_vectors_of_transformers(make: encoders.Make) -> None:
    directory, model = make("deberta-v3", num_hidden_layers=2)
    with LLM(str(directory), device="interpreter", max_num_seqs=4, block_size=16) as llm:
        for output in llm.embed(["a b c d", "z y x q"], pooling="mean", use_tqdm=False):
            expected = encoders.unit(encoders.hidden(model, output.prompt_token_ids).mean(0))
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
