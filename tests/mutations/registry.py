"""All mutations, by kind."""

from mutations import (
    blocks,
    checkpoint_files,
    data_order,
    microbatches,
    optimizers,
    random_bits,
    reductions,
    resuming,
    scales,
    stages,
    stale_weights,
    statistics_of,
    tensor_shards,
    traces,
)

KINDS = {
    "Reductions": reductions,
    "Factors": scales,
    "Statistics": statistics_of,
    "Random bits": random_bits,
    "Microbatches": microbatches,
    "Stale weights": stale_weights,
    "Tensor shards": tensor_shards,
    "Rolled blocks": blocks,
    "Pipeline stages": stages,
    "Optimizer": optimizers,
    "Tracing": traces,
    "Data": data_order,
    "Resuming": resuming,
    "Checkpoints": checkpoint_files,
}
MUTATIONS = tuple(mutation for kind in KINDS.values() for mutation in kind.MUTATIONS)
