"""DP-FedEmb: only the backbone is aggregated; each virtual client has a head of its own.

Xu et al., "Learning to Generate Image Embeddings with User-level Differential Privacy", CVPR 2023
(arXiv 2211.10844).
"""

import tensorflow_federated as tff

from tff_dpfedemb.algorithms import process
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.models import embedding_model as embedding_model_lib


def build_dp_fedemb(
    model: embedding_model_lib.EmbeddingModel,
    training: ClientTraining,
    dataset_computation: tff.Computation,
    aggregation_factory: tff.aggregators.UnweightedAggregationFactory,
    server_optimizer: tff.learning.optimizers.Optimizer,
    seed: int = 0,
) -> tff.learning.templates.LearningProcess:
    """Builds DP-FedEmb; arguments and result as for `process.build_process`."""
    return process.build_process(
        model,
        training,
        dataset_computation,
        aggregation_factory,
        server_optimizer,
        seed,
        global_head=False,
    )
