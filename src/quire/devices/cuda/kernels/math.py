"""Functions of float32 tiles that several kernels share, each of which rounds every step by itself, and types."""

import torch

from quire.devices.cuda.language import tl, triton

NUMBERS = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8,
    torch.uint8: tl.uint8, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip
"""NUMBERS are the types of elements at addresses."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def tanh(x):
    small = exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """An activation by its name (operands.Activation)."""
    if KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif KIND == "sigmoid":
        x = sigmoid(x)
    elif KIND == "softplus":
        x = tl.maximum(x, 0.0) + tl.log(1.0 + exp(-tl.abs(x)))
    else:
        tl.static_assert(KIND == "", "no such activation")
    return x


@triton.jit
def gate(x, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """activation(x) * up, with the bounds of GatedLinear."""
    bound: tl.constexpr = 7.0 if KIND == "clamped_swiglu" and LIMIT == 0 else LIMIT
    if bound == 0:
        y = activate(x, "silu" if KIND == "clamped_silu" else KIND) * up
    else:
        low, up = tl.minimum(x, bound), tl.minimum(tl.maximum(up, -bound), bound)
        if KIND == "clamped_swiglu":
            y = low * sigmoid(1.702 * low) * (up + 1.0)
        elif KIND == "clamped_silu":
            y = activate(low, "silu") * up
        else:
            y = tl.minimum(activate(x, KIND), bound) * up
    return y
