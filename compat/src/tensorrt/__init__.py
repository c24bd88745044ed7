"""The names of TensorRT that scripts for TensorRT-LLM use beside it. Quire needs no TensorRT."""

from enum import Enum, IntEnum

__version__ = "10.0.0"


class DataType(Enum):
    """Types of tensors."""

    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    FP8 = "fp8"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"


float32, float16, bfloat16, fp8 = DataType.FLOAT, DataType.HALF, DataType.BF16, DataType.FP8
int8, int32, int64, bool = DataType.INT8, DataType.INT32, DataType.INT64, DataType.BOOL


class ProfilingVerbosity(Enum):
    """How much an engine reports about its layers."""

    LAYER_NAMES_ONLY = "layer_names_only"
    NONE = "none"
    DETAILED = "detailed"


class MemoryPoolType(Enum):
    """Kinds of memory that a build may limit."""

    WORKSPACE = "workspace"
    TACTIC_SHARED_MEMORY = "tactic_shared_memory"


class BuilderFlag(Enum):
    """Options of a build that are on or off."""

    FP16 = "float16"
    BF16 = "bfloat16"
    FP8 = "fp8"
    INT8 = "int8"
    TF32 = "tf32"
    REFIT = "refit"
    STRIP_PLAN = "strip_plan"
    OBEY_PRECISION_CONSTRAINTS = "obey_precision_constraints"


class Logger:
    """A level for messages. Quire logs through Python's `logging`."""

    class Severity(IntEnum):
        """Levels, the most severe first."""

        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        self.min_severity = min_severity
