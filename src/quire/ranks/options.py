"""Options of models divided among several processes, and the place of each: a section like config's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.errors import ConfigError
from quire.options import check_options, option
from quire.sockets import is_local

Executor = Literal["mp", "ray"]
MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Dividing a model among ranks: processes that each hold a share of it.

    Rank 0 is the engine's own process. Ranks of a pipeline stage have consecutive numbers, and the last stage comes
    first, because the engine samples from its logits: rank r computes stage `stages - 1 - r // size`.
    """

    tensor_parallel_size: int = option(
        1,
        "Processes that divide each layer among them, and the threads.",
        low=1,
        high=MOST_RANKS,
        short="-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that hold a run of layers each, as many batches at once.",
        low=1,
        high=MOST_RANKS,
        short="-pp",
    )
    enable_expert_parallel: bool = option(
        False, "Spread whole experts over the ranks of a stage, and not a part of each."
    )
    exact_across_ranks: bool = option(
        False, "The same bits with any number of ranks: they gather inputs, and add no parts of sums."
    )
    distributed_executor_backend: Executor = option(
        "mp",
        "What starts the other ranks: mp (this machine, and --nnodes), or ray (a Ray cluster).",
        aliases={"uni": "mp"},
    )
    nnodes: int = option(
        1, "Machines that the ranks are spread over, in equal numbers.", low=1, high=MOST_RANKS
    )
    node_rank: int = option(0, "The number of this machine; 0 has the engine and the server.", low=0)
    master_addr: str = option("127.0.0.1", "Address of machine 0, at which the others find the engine.")
    master_port: int = option(29501, "Port of the engine at --master-addr.", low=1, high=65535)
    distributed_timeout_seconds: int = option(
        300, "Seconds in which all ranks must have found the engine.", low=1
    )
    distributed_secret_file: str | None = option(
        None,
        "File with a secret that all machines share: without it, whoever reaches the port can pose as a rank.",
    )
    distributed_without_secret: bool = option(
        False, "Let ranks of other machines join without a secret, in a network that nobody else reaches."
    )
    disable_custom_all_reduce: bool = option(
        False, "Let ranks exchange activations through torch.distributed (gloo): slower, for comparison."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.world > MOST_RANKS:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} x --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} are {self.world} ranks; at most {MOST_RANKS} are supported"
            )
        if self.enable_expert_parallel and self.exact_across_ranks:
            raise ConfigError(
                "--enable-expert-parallel adds the outputs of experts in another order than one rank does: leave out "
                "--exact-across-ranks"
            )
        if self.world % self.nnodes:
            raise ConfigError(f"--nnodes {self.nnodes} does not divide {self.world} ranks evenly: change it")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}")
        trusted = (
            self.distributed_secret_file or self.distributed_without_secret or is_local(self.master_addr)
        )
        if self.nnodes > 1 and not trusted:
            raise ConfigError(
                "--nnodes needs --distributed-secret-file, or strangers could pose as ranks; "
                "--distributed-without-secret is for a network that nobody else reaches"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "ray":
            raise ConfigError("--nnodes is for --distributed-executor-backend mp: Ray knows its own nodes")

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nnodes

    @property
    def own_ranks(self) -> range:
        """Return the ranks on this machine."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def stage_of(self, rank: int) -> int:
        return self.pipeline_parallel_size - 1 - rank // self.tensor_parallel_size

    def group_of(self, rank: int) -> range:
        """Return the ranks that compute the same stage as `rank`."""
        first = rank - rank % self.tensor_parallel_size
        return range(first, first + self.tensor_parallel_size)

    @property
    def secret(self) -> bytes:
        """Read the secret that ranks of other machines prove to know. ConfigError: unreadable or empty file."""
        if self.distributed_secret_file is None:
            return b""
        try:
            content = Path(self.distributed_secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--distributed-secret-file: {error}") from error
        if not content:
            raise ConfigError(f"--distributed-secret-file {self.distributed_secret_file} is empty")
        return content
