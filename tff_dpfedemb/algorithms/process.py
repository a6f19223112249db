"""What the algorithms share: a TFF `LearningProcess`, composed from TFF's templates.

broadcast -> local training -> clip, sum, noise, divide by V -> server optimiser. What is broadcast
and aggregated is what the algorithms differ in.
"""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpfedemb.algorithms import client_update as client_update_lib
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.models import layers

# Keeps the global head's stream apart from any other that is derived from the same seed.
_HEAD_STREAM = 0x48454144


def _build_client_work(
    model: embedding_model_lib.EmbeddingModel,
    training: client_update_lib.ClientTraining,
    weights_type: tff.Type,
    global_head: bool,
) -> tff.learning.templates.ClientWorkProcess:
    """The client work: local training on the one dense element of a virtual client."""
    data_type = tff.SequenceType(
        collections.OrderedDict(
            images=tff.TensorType(np.uint8, [None, *model.image_shape]),
            class_ids=tff.TensorType(np.int64, [None]),
            seed=tff.TensorType(np.int64, [2]),
        )
    )

    @tff.federated_computation
    def initialize():
        return tff.federated_value((), tff.SERVER)

    @tff.tensorflow.computation(weights_type, data_type)
    def train(weights, dataset):
        backbone = model.build_backbone()
        update = client_update_lib.build_client_update(model, training, backbone, global_head)
        client = dataset.get_single_element()
        delta, measurements = update(
            weights.trainable,
            weights.non_trainable,
            client["images"],
            client["class_ids"],
            client["seed"],
        )
        return (
            tff.learning.templates.ClientResult(update=delta, update_weight=tf.constant(1.0)),
            measurements,
        )

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def work(state, weights, data):
        result, measurements = tff.federated_map(train, (weights, data))
        return tff.templates.MeasuredProcessOutput(state, result, tff.federated_sum(measurements))

    return tff.learning.templates.ClientWorkProcess(initialize, work)


def _refuse_drifting_weights(
    model: embedding_model_lib.EmbeddingModel, backbone: tf.keras.Model
) -> None:
    """Refuses weights that a layer in training changes by other means than gradients."""
    drifting = layers.drifting_weights(backbone)
    if drifting:
        raise ValueError(
            f"model_backbone={model.backbone!r}: has weights that are not trained by gradients, "
            "such as batch normalisation statistics, which are neither aggregated nor private: "
            f"{', '.join(drifting)}; accepted are layers without, such as group normalisation"
        )


def build_process(
    model: embedding_model_lib.EmbeddingModel,
    training: client_update_lib.ClientTraining,
    dataset_computation: tff.Computation,
    aggregation_factory: tff.aggregators.UnweightedAggregationFactory,
    server_optimizer: tff.learning.optimizers.Optimizer,
    seed: int,
    *,
    global_head: bool,
) -> tff.learning.templates.LearningProcess:
    """Builds a training process.

    Args:
        model: The architecture; its backbone's trainable weights are trained, and its frozen ones
            are the model's non-trainable weights.
        training: How a virtual client trains.
        dataset_computation: From (user_ids, seed) to a sequence of one dense element, see
            `data.virtual_clients`.
        aggregation_factory: How deltas become their released mean, see `privacy.aggregators`.
        server_optimizer: Applies the released mean to the weights as a gradient.
        seed: Seed of the initial weights.
        global_head: Whether there is one head for all, which is trained and aggregated with the
            backbone, and follows it in the trainable weights.

    Returns:
        A process whose `next` takes a list of (user_ids, seed) structures, one a virtual client,
        and whose `client_work` measurements are sums over the virtual clients.
    """

    @tff.tensorflow.computation
    def initial_weights():
        backbone = model.build_backbone(seed)
        _refuse_drifting_weights(model, backbone)
        head = model.initial_head(tf.constant([seed, _HEAD_STREAM])) if global_head else ()
        return tff.learning.models.ModelWeights(
            trainable=(*(v.read_value() for v in backbone.trainable_variables), *head),
            non_trainable=tuple(v.read_value() for v in backbone.non_trainable_variables),
        )

    weights_type = initial_weights.type_signature.result
    process = tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        _build_client_work(model, training, weights_type, global_head),
        tff.aggregators.as_weighted_aggregator(aggregation_factory).create(
            weights_type.trainable, tff.TensorType(np.float32)
        ),
        tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
    )
    return tff.simulation.compose_dataset_computation_with_learning_process(
        dataset_computation, process
    )
