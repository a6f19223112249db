"""User ids and seeds reach the worker as they are, and examples come in the users' order."""

import unittest

import hypothesis
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tff_dpfedemb.data import virtual_clients
from tff_dpfedemb.runtime import worker as worker_lib

_LONG = 3000  # Bytes an id may have here.

_AWKWARD = (
    b"plain",
    b" a b ",
    b"",
    b"\x00",
    b"trailing\x00\x00",
    b"\x00leading",
    b"a,b;c|d\te\nf/g\\h",
    b"\xff\xfe\x80",
    "schön ☃".encode(),
    b"x" * _LONG,
)


def setUpModule():
    global _echo_bytes, _echo_int64
    unittest.enterModuleContext(worker_lib.local_execution())
    _echo_bytes = _reader(_show_bytes, np.bytes_)
    _echo_int64 = _reader(_show_int64, np.int64)


def _show_bytes(user_ids):
    """An example a user: the id's bytes as an image, its length as the class."""
    pixels = tf.io.decode_raw(user_ids, tf.uint8, fixed_length=_LONG)
    lengths = tf.strings.length(user_ids)
    return tf.reshape(pixels, [-1, _LONG, 1, 1]), tf.cast(lengths, tf.int64)


def _show_int64(user_ids):
    """id % 3 examples a user, whose class is the id."""
    class_ids = tf.repeat(user_ids, tf.math.floormod(user_ids, 3))
    pixels = tf.cast(tf.range(tf.size(class_ids)), tf.uint8)
    return tf.reshape(pixels, [-1, 1, 1, 1]), class_ids


def _reader(load_users, user_id_dtype):
    """A computation that returns each virtual client's one element, from the worker."""
    dataset = virtual_clients.build_dataset_computation(load_users, user_id_dtype)

    @tff.tensorflow.computation(dataset.type_signature.result)
    def element(examples):
        return examples.get_single_element()

    @tff.federated_computation(tff.FederatedType(dataset.type_signature.parameter, tff.CLIENTS))
    def read(arguments):
        return tff.federated_map(element, tff.federated_map(dataset, arguments))

    return read


def _seeds(count):
    return [np.array([i, -i], np.int64) for i in range(count)]


def _bytes_array(ids):
    array = np.empty(len(ids), object)
    array[:] = ids
    return array


def _sent_back(element):
    return [
        image.tobytes()[:length]
        for image, length in zip(element["images"], element["class_ids"], strict=True)
    ]


class BytesTest(parameterized.TestCase):
    def test_any_bytes_come_back(self):
        cohort = [_bytes_array(_AWKWARD), _bytes_array([]), *(_bytes_array([i]) for i in _AWKWARD)]
        elements = _echo_bytes(virtual_clients.client_arguments(cohort, _seeds(len(cohort))))
        for ids, element in zip(cohort, elements, strict=True):
            self.assertEqual(_sent_back(element), list(ids))

    @hypothesis.settings(max_examples=25, deadline=None)
    @hypothesis.given(st.lists(st.binary(max_size=20), max_size=5))
    def test_random_bytes_come_back(self, ids):
        arguments = virtual_clients.client_arguments([_bytes_array(ids)], _seeds(1))
        self.assertEqual(_sent_back(_echo_bytes(arguments)[0]), ids)

    @parameterized.parameters((np.array([b"a", b"bc"]),), (np.array(["a", "bc"]),))
    def test_arrays_that_drop_trailing_nuls_are_refused(self, ids):
        with self.assertRaisesRegex(ValueError, "^user_ids of dtype .*: accepted are"):
            virtual_clients.client_arguments([ids], _seeds(1))


class Int64Test(absltest.TestCase):
    def test_users_come_in_order_and_seeds_with_them(self):
        extremes = np.array([2**63 - 1, -(2**63), 2**53 + 1, -1, 0], np.int64)
        cohort = [extremes, np.array([], np.int64), np.array([5, 4, 5], np.int64)]
        elements = _echo_int64(virtual_clients.client_arguments(cohort, _seeds(3)))
        for ids, seed, element in zip(cohort, _seeds(3), elements, strict=True):
            expected = np.repeat(ids, ids % 3)
            np.testing.assert_array_equal(element["class_ids"], expected)
            np.testing.assert_array_equal(element["images"].ravel(), np.arange(len(expected)))
            np.testing.assert_array_equal(element["seed"], seed)
            self.assertEqual(element["images"].dtype, np.uint8)
            self.assertEqual(element["class_ids"].dtype, np.int64)
        self.assertEqual(elements[1]["images"].shape, (0, 1, 1, 1))

    def test_ids_and_seeds_go_in_pairs(self):
        with self.assertRaises(ValueError):
            virtual_clients.client_arguments([np.array([1])], _seeds(2))


if __name__ == "__main__":
    absltest.main()
