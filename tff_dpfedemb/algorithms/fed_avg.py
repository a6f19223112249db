"""DP federated averaging, the baseline: backbone and one global head are aggregated together.

The head has a row for each training class, so it grows with the class space, takes its part of the
clip norm, and carries noise of its own. McMahan et al., "Learning Differentially Private Recurrent
Language Models", ICLR 2018 (arXiv 1710.06963), for a model with a head.
"""

import tensorflow_federated as tff

from tff_dpfedemb.algorithms import process
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.models import embedding_model as embedding_model_lib


def build_fed_avg(
    model: embedding_model_lib.EmbeddingModel,
    training: ClientTraining,
    dataset_computation: tff.Computation,
    aggregation_factory: tff.aggregators.UnweightedAggregationFactory,
    server_optimizer: tff.learning.optimizers.Optimizer,
    seed: int = 0,
) -> tff.learning.templates.LearningProcess:
    """Builds federated averaging; arguments and result as for `process.build_process`.

    The model's `head_size` is the number of training classes. The trainable weights are the
    backbone's and, last, the head's kernel and bias.
    """
    return process.build_process(
        model,
        training,
        dataset_computation,
        aggregation_factory,
        server_optimizer,
        seed,
        global_head=True,
    )
