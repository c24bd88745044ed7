"""Names of the heads of encoders that classify, as data. Knows no family's maths, and imports none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ClassifierNames:
    """Where a classifier over one pooled vector lies: dense (activated), a norm or none, then the labels' weights.

    `base` may be left out of `dense` where it begins with it, as in TensorNames. `pooling` is the config's way to
    pool if it names none.
    """

    dense: str
    out: str
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    norm: str | None = None
    pooling: str = "cls"


CLASSIFIERS: Mapping[str, ClassifierNames] = {
    "BertForSequenceClassification": ClassifierNames("bert.pooler.dense", "classifier"),
    "RobertaForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "XLMRobertaForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "JinaEmbeddingsV3ForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "EuroBertForSequenceClassification": ClassifierNames("dense", "classifier", "gelu", pooling="late"),
    "MPNetForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "DistilBertForSequenceClassification": ClassifierNames("pre_classifier", "classifier", "relu"),
    "DebertaForSequenceClassification": ClassifierNames("pooler.dense", "classifier", "gelu"),
    "DebertaV2ForSequenceClassification": ClassifierNames("pooler.dense", "classifier", "gelu"),
    "ModernBertForSequenceClassification": ClassifierNames("head.dense", "classifier", "gelu", "head.norm"),
}
