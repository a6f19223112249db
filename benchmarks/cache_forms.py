"""Seconds to read a virtual client from caches of several forms, beside the time of training on it.

    python -m benchmarks.cache_forms --output=cache_forms.json

Forms: "raw", "png" and "jpeg" are `tasks.image_cache` with its encodings; "files" is one TFRecord
file of encoded images a user, as TFF's own file-per-user data are. Users are drawn at random; forms
alternate within one process, and the medians are compared. What is read was written just before, so
it comes from memory: a disk adds its own time, in proportion to the bytes. Training is one epoch of
lenet on the 28x28 images: the shortest training that a round can have.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from absl import app, flags

from tasks import image_cache, preparation
from tasks.fixtures import pictures
from tff_dpfedemb import atomic
from tff_dpfedemb.algorithms import client_update, hyperparameters
from tff_dpfedemb.models import embedding_model

_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed virtual clients of each form.", lower_bound=1)
_SIZE = flags.DEFINE_integer("virtual_client_size", 8, "Users in a virtual client.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file of the figures.")

# Shape, users, images of each user: EMNIST's writers have about 240, photographers fewer.
_DATA = (((28, 28, 1), 200, 240), ((112, 112, 3), 200, 20), ((224, 224, 3), 100, 20))
_CLASSES = 36
_DISTINCT = 100  # Pictures that are drawn; more would only take time.


def _write_caches(folder: str, shape: tuple[int, int, int], users: int, images: int) -> dict:
    """Loaders by form, and bytes an image by form."""
    drawn = [
        pictures.picture(str(i % _CLASSES), "u", i, shape[0], shape[1])[:, :, : shape[2]]
        for i in range(_DISTINCT)
    ]
    examples = [
        preparation.Example(str(user), str(i % _CLASSES), f"{user}/{i}")
        for user in range(users)
        for i in range(images)
    ]

    def read(name: str) -> np.ndarray:
        user, number = map(int, name.split("/"))
        return drawn[(user * images + number) % _DISTINCT]

    forms: dict[str, tuple[Callable[[Any], Any], float]] = {}
    for encoding in image_cache.ENCODINGS:
        path = os.path.join(folder, f"{shape[0]}-{encoding}")
        preparation.prepare(preparation.Listing(examples, read, {}), path, shape, encoding=encoding)
        cache = image_cache.ImageCache(path)
        size = os.path.getsize(os.path.join(path, image_cache.DATABASE)) / len(examples)
        forms[encoding] = (
            lambda ids, cache=cache: cache.load_users(ids, np.arange(_CLASSES)),
            size,
        )
    files = os.path.join(folder, f"{shape[0]}-files")
    os.makedirs(files)
    encoding = image_cache.choose_encoding(shape)
    for user in range(users):
        with tf.io.TFRecordWriter(os.path.join(files, str(user))) as writer:
            for i in range(images):
                stored = image_cache.encode(read(f"{user}/{i}"), encoding)
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[stored])),
                    "class": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % _CLASSES])),
                }
                writer.write(
                    tf.train.Example(
                        features=tf.train.Features(feature=features)
                    ).SerializeToString()
                )
    total = sum(entry.stat().st_size for entry in os.scandir(files))
    forms["files"] = (lambda ids: _load_files(files, ids, encoding, shape), total / len(examples))
    return forms


def _load_files(folder: str, ids: Any, encoding: str, shape: tuple[int, int, int]) -> Any:
    """Reads users from files of their own."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "class": tf.io.FixedLenFeature([], tf.int64),
    }
    paths = tf.strings.join([folder, "/", tf.strings.as_string(ids)])
    records = tf.data.TFRecordDataset(paths).batch(1 << 40).get_single_element()
    parsed = tf.io.parse_example(records, features)
    if encoding == "raw":
        images = tf.io.decode_raw(parsed["image"], tf.uint8)
    else:
        images = tf.map_fn(
            lambda file: tf.ensure_shape(
                tf.io.decode_jpeg(file, shape[2], dct_method="INTEGER_ACCURATE"), shape
            ),
            parsed["image"],
            fn_output_signature=tf.TensorSpec(shape, tf.uint8),
        )
    return tf.reshape(images, [-1, *shape]), parsed["class"]


def _training_seconds(load: Callable[[Any], Any], cohorts: list[np.ndarray]) -> list[float]:
    """Seconds of one epoch of lenet on each virtual client."""
    model = embedding_model.EmbeddingModel("lenet", (28, 28, 1), 128, _CLASSES)
    training = hyperparameters.ClientTraining(0.005, 0.9, 100.0, 1, 32, 1 << 20)
    backbone = model.build_backbone()
    update = client_update.build_client_update(model, training, backbone)
    weights = tuple(v.numpy() for v in backbone.trainable_variables)
    seconds = []
    for cohort in cohorts:
        images, class_ids = load(cohort)
        start = time.perf_counter()
        update(weights, (), images, class_ids, tf.constant([0, 1], tf.int64))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main(argv: list[str]) -> None:
    """Measures, prints a table, and writes the figures."""
    del argv
    results = []
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for shape, users, images in _DATA:
            forms = {
                form: (tf.function(load, input_signature=[tf.TensorSpec([None], tf.int64)]), size)
                for form, (load, size) in _write_caches(folder, shape, users, images).items()
            }
            cohorts = [
                rng.choice(users, _SIZE.value, replace=False) for _ in range(_REPEATS.value + 1)
            ]
            seconds: dict[str, list[float]] = {form: [] for form in forms}
            for cohort in cohorts:
                for form, (load, _) in forms.items():
                    start = time.perf_counter()
                    load(cohort)
                    seconds[form].append(time.perf_counter() - start)
            training = None
            if shape == (28, 28, 1):
                training = float(np.median(_training_seconds(forms["raw"][0], cohorts)))
            for form, (_, size) in forms.items():
                median = float(np.median(seconds[form][1:]))
                results.append(
                    {
                        "shape": shape,
                        "form": form,
                        "bytes_per_image": size,
                        "seconds_per_virtual_client": median,
                        "images_per_second": _SIZE.value * images / median,
                        "share_of_one_lenet_epoch": training and median / (training + median),
                    }
                )
    print(
        f"{'shape':>14} {'form':>6} {'bytes/image':>12} {'images/s':>10} {'share of an epoch':>18}"
    )
    for r in results:
        share = r["share_of_one_lenet_epoch"]
        print(
            f"{'x'.join(map(str, r['shape'])):>14} {r['form']:>6} {r['bytes_per_image']:>12,.0f} "
            f"{r['images_per_second']:>10,.0f} {'' if share is None else f'{share:.1%}':>18}"
        )
    if _OUTPUT.value:
        atomic.write_json(_OUTPUT.value, {"cores": os.cpu_count(), "results": results})


if __name__ == "__main__":
    app.run(main)
