"""Finds an adapter's tensors by the base's own names: prefixes, fused experts, tied tables. Knows names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.devices.protocol import FloatArray
from quire.errors import ModelError
from quire.model.families.composite import PREFIXES
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.pooling import HeadReader
from quire.model.pooling_head import PoolingHead
from quire.weights.adapter import AdapterFiles, LowRank
from quire.weights.checkpoint import ChangedCheckpoint, Checkpoint
from quire.weights.parts import Part

EXPERTS = re.compile(r"(?P<layer>.*\.\d+\.)([\w.]*\.)?experts(\.base_layer|\.gate_up_proj|\.down_proj)?")
MOST_LISTED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A module's change of its weight, up @ down, with the scale in `up`; `magnitude` (DoRA) and `bias` are [O]."""

    down: FloatArray
    up: FloatArray
    magnitude: FloatArray | None = None
    bias: FloatArray | None = None


class AdapterNames:
    """Finds an adapter's tensors by names of the base, and notes which of them were `used`."""

    def __init__(
        self,
        spec: DecoderConfig,
        names: TensorNames,
        files: AdapterFiles,
        open_base: Callable[[], Checkpoint] | None,
    ) -> None:
        self._spec, self._names, self._files, self._open = spec, names, files, open_base
        self._mixture = next((layer.mixture for layer in spec.layers if layer.mixture is not None), None)
        self._modules: dict[str, tuple[LowRank, str, int, slice | None]] = {}  # with (module, expert, rows)
        self._stacks: dict[str, tuple[LowRank, str]] = {}
        for module, lora in files.modules.items():
            self._enter(self._own(module), module, lora)
        self._whole = self._renamed(files.whole)
        self._tokens = self._renamed(files.tokens)
        self._copies = self._renamed(files.copies)
        self.used: set[str] = set()
        self._pairs: dict[str, Pair] = {}
        self._checkpoint: Checkpoint | None = None

    def pair(self, module: str, embedding: bool = False, transposed: bool = False) -> Pair | None:
        """Find the change of a module's weight [O, K], always the same object; `transposed`: the base stores [K, O]."""
        found = self._modules.get(module)
        if found is None or found[0].embedding != embedding:
            return None
        if module not in self._pairs:
            lora, source, expert, rows = found
            self.used.add(source)
            self._pairs[module] = self._read(lora, module, expert, rows, transposed)
        return self._pairs[module]

    def stacked(
        self, part: Part, module: str
    ) -> tuple[Pair | None, Callable[[FloatArray], FloatArray] | None]:
        """Find the change of the expert that `part` takes from a tensor of all experts, and how to take its rows."""
        found = self._stacks.get(module)
        if found is None or part.take is None:
            return None, None
        lora, source = found
        self.used.add(source)
        count, columns = part.tensors[0][1][0], self._names.expert_stack == "columns"
        take = part.take
        numbers = np.arange(count).reshape(-1, 1, 1)
        outputs = part.tensors[0][1][2 if columns else 1]
        shape = (count, 1, outputs) if columns else (count, outputs, 1)
        expert = int(take(np.broadcast_to(numbers, shape))[0, 0])
        key = f"{module}.{expert}"
        if key not in self._pairs:
            self._pairs[key] = self._read(lora, module, expert, None, False)
        pair = self._pairs[key]
        if len(pair.up) != outputs:
            raise ModelError(f"{self._files.path}: {module}: B has {len(pair.up)} rows, the base {outputs}")

        def pick(values: FloatArray) -> FloatArray:
            """Apply `take` to an array that holds these values for the expert it takes."""
            wide = np.broadcast_to(values.T if columns else values, (count, *reversed(values.shape)) if columns
                                   else (count, *values.shape))  # fmt: skip
            return np.ascontiguousarray(take(wide))

        return pair, pick

    def whole(self, tensor: str, shape: tuple[int, ...], table: bool = False) -> FloatArray | None:
        """Find a tensor that replaces the base's; also a copy of a table that differs from the base's.

        A `table` of tokens may have more rows than the base's, as far as there is room.
        """
        name = self._whole.get(tensor) or self._copies.get(tensor)
        if name is None:
            return None
        found = self._files.shape(name)
        if found != shape and not (table and self._fits(found, shape, tensor)):
            raise ModelError(f"{self._files.path}: {tensor} is {list(found)}, the base has {list(shape)}")
        self.used.add(name)
        values = self._files.values(name)
        if tensor in self._whole or not self._is_base(tensor, values):
            return values
        return None

    def _fits(self, found: tuple[int, ...], shape: tuple[int, ...], what: str) -> bool:
        """Whether a table has the base's rows and further ones. ModelError if there is no room for them."""
        if len(found) != 2 or found[1] != shape[1] or found[0] < shape[0]:
            return False
        self.check_room(found[0], what)
        return True

    def check_room(self, tokens: int, what: str) -> None:
        """Raise ModelError unless the vocabulary may have `tokens` tokens."""
        if tokens > self._spec.vocab_size:
            added = tokens - self._spec.embedding.stored_tokens
            raise ModelError(
                f"{self._files.path}: {what} adds {added} tokens: start with --lora-extra-vocab-size {added} or more"
            )

    def token_rows(self, module: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], FloatArray] | None:
        """Find the ids and new rows of a table."""
        found = self._tokens.get(module)
        if found is None:
            return None
        ids, name = found
        self.used.add(name)
        rows = self._files.values(name)
        if rows.shape != (len(ids), shape[1]):
            raise ModelError(f"{self._files.path}: trained rows of {module} do not fit {list(shape)}")
        self.check_room(max(ids) + 1, f"trainable_token_indices of {module}")
        return ids, rows

    def pooling_head(self, head_of: HeadReader) -> PoolingHead | None:
        """Read the base's pooling head with the adapter's tensors; None if it has none. ModelError: other shapes."""
        left = {tensor: name for tensor, name in self._whole.items() if name not in self.used}
        if not left or self._open is None:
            return None
        checkpoint = self._open()
        mine = left.keys() & set(checkpoint.names())
        for tensor in mine:
            found, shape = self._files.shape(left[tensor]), checkpoint.shape(tensor)
            if found != shape:
                raise ModelError(f"{self._files.path}: {tensor} is {list(found)}, the base has {list(shape)}")
        changed = ChangedCheckpoint(checkpoint, {tensor: self._files.values(left[tensor]) for tensor in mine})
        head = head_of(changed)
        self.used |= {left[tensor] for tensor in changed.read}
        return head if changed.read else None

    def check_all_used(self) -> None:
        """Raise ModelError if a part of the adapter has no place in the base."""
        files = self._files
        tokens = [name for _, name in files.tokens.values()]
        everything = [*files.modules, *files.whole.values(), *files.copies.values(), *tokens]
        left = [name for name in everything if name not in self.used]
        if left:
            more = f" and {len(left) - MOST_LISTED} more" if len(left) > MOST_LISTED else ""
            raise ModelError(
                f"{files.path}: the base has no place for {', '.join(left[:MOST_LISTED])}{more}; the adapter was made "
                f"for {files.base or 'another model'}"
            )

    def _renamed(self, names: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in names.items():
            own = self._own(name)
            if own in found:
                raise ModelError(f"{self._files.path}: two tensors are {own}")
            found[own] = value
        return found

    def _own(self, name: str) -> str:
        """Give a name the base's prefix, where multimodal wrappers of a language model have another."""
        tail = re.search(r"(layers\.\d+\.|embed_tokens|norm)", self._names.layer.format(i=0))
        own = self._names.layer[: tail.start()] if tail else ""
        for prefix in (*PREFIXES, "model."):
            rest = name.removeprefix(prefix)
            if rest != name and re.match(r"(layers\.\d+\.|embed_tokens\b|norm\b)", rest) and tail:
                name = own + rest
                break
        router = re.fullmatch(r"(.*\.\d+\.)mlp\.gate", name)
        return f"{router[1]}{self._names['mixture.router']}" if router and self._mixture is not None else name

    def _enter(self, own: str, module: str, lora: LowRank) -> None:
        if own in self._modules or own in self._stacks:
            raise ModelError(f"{self._files.path}: two modules are {own}")
        fused = EXPERTS.fullmatch(own)
        moe = self._mixture
        if fused is None or moe is None:
            self._modules[own] = lora, module, -1, None
            return
        names, inner = self._names, moe.intermediate_size
        (rows, width), (out, _) = (self._files.shape(lora.tensors[part]) for part in ("A", "B"))
        count = moe.routing.num_experts - moe.zero_experts
        if rows != count * lora.rank:
            raise ModelError(
                f"{self._files.path}: {module}: {rows} rows of A for {count} experts of rank {lora.rank}"
            )
        is_down = (out, width) == (self._spec.hidden_size, inner)
        if not is_down and (out, width) != (2 * inner, self._spec.hidden_size):
            raise ModelError(f"{self._files.path}: {module}: a change of {[out, width]} fits no experts")
        if names.expert_stack:
            target = names["mixture.expert.down"] if is_down else names["mixture.expert.up"]
            self._stacks[f"{fused['layer']}{names['mixture.experts']}{target}"] = lora, module
            return
        for e in range(count):
            prefix = f"{fused['layer']}{names['mixture.experts'].format(e=e)}"
            if is_down:
                self._modules[prefix + names["mixture.expert.down"]] = lora, module, e, None
            else:
                self._modules[prefix + names["mixture.expert.gate"]] = lora, module, e, slice(0, inner)
                self._modules[prefix + names["mixture.expert.up"]] = lora, module, e, slice(inner, 2 * inner)

    def _read(self, lora: LowRank, module: str, expert: int, rows: slice | None, transposed: bool) -> Pair:
        down, up = (self._files.values(lora.tensors[part]) for part in ("A", "B"))
        if expert >= 0:  # A holds expert after expert, in B the expert runs fastest
            down = down.reshape(-1, lora.rank, down.shape[1])[expert]
            up = up.reshape(len(up), lora.rank, -1)[:, :, expert]
        if rows is not None:
            up = up[rows]
        up = up * np.float32(lora.scale)
        if self._files.start and not lora.embedding:
            first_up, first_down = self._first_guess(lora, module, transposed)
            down, up = np.concatenate([down, first_down]), np.concatenate([up, -first_up], axis=1)
        vectors = {}
        for role, key in (("magnitude", "magnitude_vector"), ("bias", "B.bias")):
            if key in lora.tensors:
                vectors[role] = self._files.values(lora.tensors[key]).reshape(-1)
                if len(vectors[role]) != len(up):
                    raise ModelError(f"{self._files.path}: {module}: {key} has {len(vectors[role])} elements")
        if "bias" in vectors:
            vectors["bias"] = vectors["bias"] * np.float32(lora.scale)
        return Pair(np.ascontiguousarray(down), np.ascontiguousarray(up), **vectors)

    def _first_guess(self, lora: LowRank, module: str, transposed: bool) -> tuple[FloatArray, FloatArray]:
        """Compute the initial low-rank factors that training subtracted from the base weight.

        PiSSA (Meng et al. 2024, arXiv:2404.02948): the first r singular directions. OLoRA (Büyükakyüz 2024,
        arXiv:2406.01775): scale times the first r columns of Q and rows of R.
        """
        weight = self._base_tensor(f"{module}.weight").astype(np.float64)
        weight = weight.T if transposed else weight
        if self._files.start == "pissa":
            left, sizes, right = np.linalg.svd(weight, full_matrices=False)
            up, down = left[:, : lora.rank] * sizes[: lora.rank], right[: lora.rank]
        else:
            q, r = np.linalg.qr(weight)
            up, down = lora.scale * q[:, : lora.rank], r[: lora.rank]
        return up.astype(np.float32), down.astype(np.float32)

    def _base_tensor(self, name: str) -> FloatArray:
        if self._checkpoint is None:
            if self._open is None:
                raise ModelError(
                    f"{self._files.path}: the adapter needs the base's own weights, which a built engine lacks: "
                    "serve the checkpoint, or convert the adapter"
                )
            self._checkpoint = self._open()
        if name == f"{self._names['head']}.weight" and self._spec.tied:
            name = f"{self._names['embedding']}.weight"
        if name not in set(self._checkpoint.names()):
            raise ModelError(f"{self._files.path}: the base has no {name}")
        return np.array(self._checkpoint.get(name), np.float32)

    def _is_base(self, tensor: str, values: FloatArray) -> bool:
        """Whether a table that was saved along is the base's own."""
        if self._open is None:
            return True
        return np.array_equal(self._base_tensor(tensor), values)
