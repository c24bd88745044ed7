"""Names a GGUF model's matrices as adapters do: by its family's names in Hugging Face's files."""

from __future__ import annotations

from quire.model.families import load_family
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Listing
from quire.model.split_matrices import ApartCheckpoint, TensorPart
from quire.model.tensors import Tensors
from quire.weights.checkpoint import Checkpoint


def family_names(spec: DecoderConfig) -> TensorNames:
    return load_family(spec.architecture).tensor_names(spec, ConfigReader({}, spec.architecture))


def by_family_names(
    config: DecoderConfig, names: TensorNames, own: TensorNames, checkpoint: Checkpoint
) -> ApartCheckpoint:
    """Give matrices that both formats store alike the family's `names`."""
    listing, theirs, ours = Listing(), Tensors(config, names), Tensors(config, own)
    Decoder(config, listing)
    pieces: dict[str, TensorPart] = {}
    for piece in listing.pieces:
        wanted, found = theirs.part(piece).tensors, ours.part(piece).tensors
        if len(piece.shape) < 2 or names.transposed or not len(wanted) == len(found) == 1:
            continue
        (name, shape), (source, stored) = wanted[0], found[0]
        if shape == stored:
            pieces[name] = TensorPart(source, None, shape)
    return ApartCheckpoint(checkpoint, pieces)
