"""Neither Python nor the worker keeps what a round needed. Linux only, as it reads /proc."""

import os

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest

from tff_dpfedemb.algorithms import dp_fedemb
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker as worker_lib

_WARM_UP, _ROUNDS = 40, 100
_COHORT_SIZES = 10
# A leak of 1 MB a round makes 60; the worker's allocator drifts by 8 to 23 (measured).
_ALLOWED_MB = 40


def _load_users(user_ids):
    """20 images a user."""
    n = 20 * tf.size(user_ids)
    images = tf.random.stateless_uniform([n, 8, 8, 1], [0, 0], 0, 256, tf.int32)
    return tf.cast(images, tf.uint8), tf.cast(tf.range(n) % 5, tf.int64)


def _resident_mb(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        (line,) = (line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class MemoryTest(absltest.TestCase):
    @pytest.mark.slow
    def test_is_flat_after_warm_up(self):
        plan = plan_lib.PrivacyPlan(
            population=10_000,
            virtual_clients_per_round=5,
            virtual_client_size=1,
            total_rounds=_ROUNDS,
            clip_norm=1.0,
            noise_multiplier=1.0,
        )
        model = embedding_model_lib.EmbeddingModel("lenet", (8, 8, 1), 128, 10)
        training = ClientTraining(
            client_lr=0.01,
            client_momentum=0.9,
            head_lr_scale=1.0,
            client_epochs_per_round=1,
            client_batch_size=16,
            max_examples_per_client=1000,
        )
        resident = []
        with worker_lib.local_execution() as worker:
            process = dp_fedemb.build_dp_fedemb(
                model,
                training,
                virtual_clients.build_dataset_computation(_load_users, np.int64),
                aggregators.build_aggregation_factory(plan),
                tff.learning.optimizers.build_sgdm(0.1, 0.9),
            )
            state = process.initialize()
            for number in range(_ROUNDS):
                # More sizes than the executors that a worker keeps: each round needs a new one.
                users = np.arange(1 + number % _COHORT_SIZES)
                cohort = np.split(users, len(users))
                seeds = sampling.client_seeds(0, number, len(cohort))
                arguments = virtual_clients.client_arguments(cohort, seeds)
                state = process.next(state, arguments).state
                resident.append([_resident_mb(pid) for pid in (os.getpid(), worker.pids[1])])
        python, worker = np.max(resident[_ROUNDS - 10 :], axis=0) - np.max(
            resident[_WARM_UP - 10 : _WARM_UP], axis=0
        )
        self.assertLess(python, _ALLOWED_MB)
        self.assertLess(worker, _ALLOWED_MB)


if __name__ == "__main__":
    absltest.main()
