"""Other engines' output as rollout batches: `from_<engine>` takes live objects, `adapt_files` what was recorded."""

from keptset.schemas.adapters.collect import Adapted
from keptset.schemas.adapters.fastdeploy import from_fastdeploy
from keptset.schemas.adapters.prime_rl import from_prime_rl
from keptset.schemas.adapters.recorded import adapt_files
from keptset.schemas.adapters.registry import adapter_for
from keptset.schemas.adapters.rejected import Rejected, RejectedWriter
from keptset.schemas.adapters.settings import Stated
from keptset.schemas.adapters.sglang import from_sglang
from keptset.schemas.adapters.slime import from_slime
from keptset.schemas.adapters.transformers import from_transformers
from keptset.schemas.adapters.vllm import from_vllm

__all__ = [
    "Adapted",
    "Rejected",
    "RejectedWriter",
    "Stated",
    "adapt_files",
    "adapter_for",
    "from_fastdeploy",
    "from_prime_rl",
    "from_sglang",
    "from_slime",
    "from_transformers",
    "from_vllm",
]
