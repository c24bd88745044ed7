"""Networks written in Python, which `quire.build` builds like checkpoints. Names are TensorRT-LLM's."""

from quire.network.layers import MLP, Attention, Embedding, GatedMLP, LayerNorm, Linear, RmsNorm
from quire.network.recording import Module, ModuleList, Network, Parameter, Tensor, net_guard

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Network",
    "Parameter",
    "RmsNorm",
    "Tensor",
    "net_guard",
]
