"""Handwritten glyphs drawn on demand: any number of users, and no files.

A user is a *writer*: a seeded style (slant, pen, proportions, warp) that all of their glyphs share,
with lasting deviations for each class they write. Images are computed from (seed, writer id) alone
by TensorFlow operations, so a population of millions costs nothing until it is sampled.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks import glyph_shapes
from tasks.task import EvaluationSet, Task

_SIZE = 28
# Training writers are 0 to num_users - 1: the writers of held-out images are never among them.
_MAX_USERS = 2**40
_FIRST_WRITER = {"validation": 2**40, "test": 2**41}
# A writer takes each class out of so many neighbours in the order of the fonts.
_NEIGHBOURS = 8
_MAX_CLASSES_PER_USER = 64
# Dabs are rounded to multiples of 1/1024, so that sums of their products are exact in float32 and
# no image depends on the order in which a device adds.
_DAB_LEVELS = 1024.0
# Shapes are stored in the graph as int16.
_SHAPE_LEVELS = 256.0


@dataclasses.dataclass(frozen=True)
class _Style:
    """How far hands differ; every number is uniform in -range to range, or in (middle, range).

    Lengths are in em units (half the em box is 1) or, where named so, in pixels; darkness and grain
    are in grey levels. Tuned so that pixels alone verify classes badly, for the differences between
    writers.
    """

    em_pixels: float = 9.5
    blur_pixels: float = 0.6
    # Lasting, of a writer.
    slant: float = 0.45
    rotation: float = 0.25
    size: tuple[float, float] = (0.84, 0.16)
    aspect: float = 0.15
    half_width_pixels: tuple[float, float] = (0.9, 0.3)
    edge_pixels: tuple[float, float] = (0.9, 0.3)
    nib: float = 0.25
    darkness: tuple[float, float] = (230.0, 25.0)
    warp: float = 0.16
    # Lasting, of the way in which a writer writes a class.
    class_matrix: float = 0.08
    class_warp: float = 0.11
    # Of one image.
    example_matrix: float = 0.05
    example_warp: float = 0.025
    example_shift: float = 0.14
    grain: float = 35.0
    # A warp is a sum of so many sinusoids, of wave vectors up to so many radians per unit.
    waves: int = 2
    wave_number: float = 3.0


_STYLE = _Style()


class Glyphs(Task):
    """Writers who each write a few of the shapes found in the Hershey fonts."""

    name = "glyphs"
    description = "Shapes of the Hershey fonts in the hands of seeded writers, 28x28 grey"
    image_shape = (_SIZE, _SIZE, 1)

    def __init__(
        self,
        num_users: int = 1_000_000,
        examples_per_user: int = 20,
        data_seed: int = 0,
        classes_per_user: int = 5,
        evaluation_writers_per_class: int = 12,
        evaluation_examples_per_writer: int = 2,
    ):
        """Initialises the task without drawing anything.

        Args:
            num_users: Size of the training population.
            examples_per_user: Images of every training writer.
            data_seed: Seed of all hands. The split into classes does not depend on it.
            classes_per_user: Classes of every writer, each with an equal share of the images.
            evaluation_writers_per_class: Held-out writers of every held-out class.
            evaluation_examples_per_writer: Images of a held-out class by each of its writers.

        Raises:
            ValueError: If an argument is out of its range.
        """
        _check(
            ("num_users", num_users, 1, _MAX_USERS),
            ("examples_per_user", examples_per_user, 1, 10_000),
            ("data_seed", data_seed, 0, 2**63 - 1),
            ("classes_per_user", classes_per_user, 1, _MAX_CLASSES_PER_USER),
            ("evaluation_writers_per_class", evaluation_writers_per_class, 1, 1_000),
            ("evaluation_examples_per_writer", evaluation_examples_per_writer, 1, 1_000),
        )
        _check(("classes_per_user", classes_per_user, 1, examples_per_user))
        self.num_users = num_users
        self.examples_per_user = examples_per_user
        self.data_seed = data_seed
        self.classes_per_user = classes_per_user
        self.evaluation_writers_per_class = evaluation_writers_per_class
        self.evaluation_examples_per_writer = evaluation_examples_per_writer
        self.num_train_classes = len(glyph_shapes.load_table().class_ids("train"))

    @classmethod
    def published_users(cls) -> int:
        return 1_000_000

    @property
    def user_id_dtype(self) -> type[np.generic]:
        return np.int64

    def user_ids(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(indices, np.int64)

    def load_users(self, user_ids: Any) -> tuple[Any, Any]:
        # Evaluation classes come last, so that the graph need not carry their shapes.
        shapes = glyph_shapes.load_shapes()[: self.num_train_classes]
        return self._draw(shapes, user_ids, self.examples_per_user)

    def evaluation_set(self, split: str) -> EvaluationSet:
        import tensorflow as tf

        if split not in _FIRST_WRITER:
            raise ValueError(f"split must be one of {sorted(_FIRST_WRITER)}, got {split!r}.")
        writers, writer_classes, drawn_for = self._evaluation_writers(split)
        shapes = glyph_shapes.load_shapes()
        slots = self.classes_per_user
        examples = slots * self.evaluation_examples_per_writer
        draw = tf.function(
            lambda ids, classes: self._draw(shapes, ids, examples, classes),
            input_signature=[
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, slots], tf.int64),
            ],
        )
        images, class_ids = (part.numpy() for part in draw(writers, writer_classes))
        used = np.repeat(drawn_for.ravel(), self.evaluation_examples_per_writer)
        num_classes = len(glyph_shapes.load_table().class_ids(split))
        return EvaluationSet(
            images[used],
            class_ids[used],
            np.repeat(writers, examples)[used],
            f"{num_classes} {split} shapes, each by {self.evaluation_writers_per_class} held-out "
            f"writers, {self.evaluation_examples_per_writer} images by each writer",
        )

    def describe(self) -> Mapping[str, Any]:
        table = glyph_shapes.load_table()
        return {
            "task": self.name,
            "num_users": self.num_users,
            "examples_per_user": self.examples_per_user,
            "classes_per_user": self.classes_per_user,
            "data_seed": self.data_seed,
            "classes": dict(table.split_sizes),
            "evaluation_writers_per_class": self.evaluation_writers_per_class,
            "evaluation_examples_per_writer": self.evaluation_examples_per_writer,
            "shapes": {
                "package": f"Hershey-Fonts {glyph_shapes.package_version()}",
                "strokes_sha256": table.strokes_sha256,
                "distinct": len(table.kept),
                "near_duplicates": len(table.duplicates),
                "too_long": len(table.too_long),
                "max_similarity": glyph_shapes.MAX_SIMILARITY,
            },
            "style": dataclasses.asdict(_STYLE),
        }

    def _evaluation_writers(self, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Held-out writers [w], their classes [w, slots], and which of these count [w, slots]."""
        classes = np.array(glyph_shapes.load_table().class_ids(split))
        slots = self.classes_per_user
        shape = (self.evaluation_writers_per_class, -(-len(classes) // slots), slots)
        rng = np.random.default_rng([self.data_seed, _FIRST_WRITER[split]])
        # Each pass over the classes has a new order: writers differ in the company of a class.
        # The last writer of a pass has slots left over; what fills them does not count.
        passes = [np.resize(rng.permutation(classes), shape[1:]) for _ in range(shape[0])]
        counts = np.arange(shape[1] * slots).reshape(shape[1:]) < len(classes)
        writer_classes = np.concatenate(passes)
        writers = _FIRST_WRITER[split] + np.arange(len(writer_classes))
        return writers, writer_classes, np.tile(counts, (shape[0], 1))

    def _draw(
        self, shapes: np.ndarray, writers: Any, examples: int, classes: Any = None
    ) -> tuple[Any, Any]:
        """Images [k * examples, ...] and class ids of writers [k] with classes [k, slots]."""
        import tensorflow as tf

        packed = tf.constant(np.round(shapes * _SHAPE_LEVELS).astype(np.int16))
        slots = self.classes_per_user

        def draw_one(inputs):
            writer, *chosen = inputs
            return _draw_writer(packed, self.data_seed, writer, slots, examples, *chosen)

        # One by one: no writer's images depend, by an ulp, on who else is in the batch, and the
        # memory in use does not grow with their number.
        writers = tf.convert_to_tensor(writers, tf.int64)
        images, class_ids = tf.map_fn(
            draw_one,
            (writers,) if classes is None else (writers, classes),
            fn_output_signature=(
                tf.TensorSpec([examples, *self.image_shape], tf.uint8),
                tf.TensorSpec([examples], tf.int64),
            ),
        )
        n = tf.shape(writers)[0] * examples
        return tf.reshape(images, [n, *self.image_shape]), tf.reshape(class_ids, [n])


def _draw_writer(
    shapes: Any, seed: int, writer: Any, slots: int, examples: int, classes: Any = None
) -> tuple[Any, Any]:
    """One writer's images [examples, 28, 28, 1] and class ids; classes [slots] or as they like."""
    import tensorflow as tf

    style = _STYLE
    wave = 5 * style.waves
    sizes = [2 + slots, 8 + wave, slots * (4 + wave), examples * (6 + wave), examples * _SIZE**2]
    numbers = tf.random.stateless_uniform(
        [sum(sizes)], tf.stack([tf.constant(seed, tf.int64), writer]), alg="philox"
    )
    choice, *ranged, grain = tf.split(numbers, sizes)
    if classes is None:
        classes = _choose_classes(choice, slots, shapes.shape[0])
    hand, per_class, per_example = (2.0 * part - 1.0 for part in ranged)
    slant, rotation, size, aspect, nib, half_width, edge, darkness = tf.unstack(hand[:8])
    slot_of_example = np.arange(examples) * slots // examples
    per_class = tf.gather(tf.reshape(per_class, [slots, 4 + wave]), slot_of_example)
    per_example = tf.reshape(per_example, [examples, 6 + wave])
    class_ids = tf.gather(classes, slot_of_example)

    points = tf.cast(tf.gather(shapes, class_ids), tf.float32) / _SHAPE_LEVELS
    x, y = points[:, :, 0], points[:, :, 1]  # [examples, points]
    waves = tf.stack(
        [tf.tile(hand[None, 8:], [examples, 1]), per_class[:, 4:], per_example[:, 6:]], 1
    )
    x, y = _warp(x, y, tf.reshape(waves, [examples, 3, style.waves, 5]))

    size = style.size[0] + style.size[1] * size
    lasting = tf.stack(
        [
            size + style.aspect * aspect,
            style.slant * slant - style.rotation * rotation,
            style.rotation * rotation,
            size - style.aspect * aspect,
        ]
    )
    # In this order, like shapes first: TensorFlow's graph optimiser would put other sums, and
    # products of three, into an order of its own, and graphs and eager execution would differ.
    matrix = lasting + (
        style.class_matrix * per_class[:, :4] + style.example_matrix * per_example[:, :4]
    )
    shift = style.example_shift * per_example[:, 4:6]
    xx, xy, yx, yy = tf.split(matrix, 4, axis=1)
    at = tf.stack([xx * x + xy * y + shift[:, :1], yx * x + yy * y + shift[:, 1:]], 1)

    distance = _distance(at, tf.stack([1.0 + style.nib * nib, 1.0 - style.nib * nib]))
    half_width = style.half_width_pixels[0] + style.half_width_pixels[1] * half_width
    edge = style.edge_pixels[0] + style.edge_pixels[1] * edge
    ink = tf.clip_by_value((half_width - distance) / edge + 0.5, 0.0, 1.0)
    darkness = style.darkness[0] + style.darkness[1] * darkness
    images = ink * (darkness - style.grain * tf.reshape(grain, [examples, _SIZE, _SIZE]))
    return tf.cast(images, tf.uint8)[..., None], class_ids


def _choose_classes(uniform: Any, slots: int, num_classes: int) -> Any:
    """Different class ids [slots]: half from around one random id, half from around another."""
    import tensorflow as tf

    def below(numbers, bound):
        return tf.cast(numbers * bound, tf.int64)

    home = below(uniform[0], num_classes)
    elsewhere = below(uniform[1], num_classes - slots * _NEIGHBOURS + 1)
    picks = np.arange(slots) * _NEIGHBOURS + below(uniform[2:], _NEIGHBOURS)
    second_half = np.arange(slots) >= (slots + 1) // 2
    return (home + picks + np.int64(second_half) * elsewhere) % num_classes


def _warp(x: Any, y: Any, waves: Any) -> tuple[Any, Any]:
    """Points [examples, points] moved by waves [examples, 3, waves, 5] of hand, class and image."""
    import tensorflow as tf

    ranges = np.array([_STYLE.warp, _STYLE.class_warp, _STYLE.example_warp], np.float32)
    along_x, along_y, phase, move_x, move_y = tf.unstack(waves[..., None], axis=3)
    swing = (
        tf.sin(
            _STYLE.wave_number * (along_x * x[:, None, None] + along_y * y[:, None, None])
            + np.pi * phase
        )
        * ranges[:, None, None]
    )
    return tuple(
        at + tf.reduce_sum(move * swing, axis=[1, 2]) for at, move in ((x, move_x), (y, move_y))
    )


def _distance(at: Any, nib: Any) -> Any:
    """Pixels' distance [examples, 28, 28] to the nearest of the points [examples, 2, points].

    A smooth minimum: from the level of a sum of Gaussian dabs, each the product of a column and a
    row, so that all pixels of an image are one product of matrices.
    """
    import tensorflow as tf

    pixels = ((np.arange(_SIZE) - (_SIZE - 1) / 2) / _STYLE.em_pixels).astype(np.float32)
    sharpness = -0.5 * tf.square(nib * (_STYLE.em_pixels / _STYLE.blur_pixels))
    exponents = tf.square(pixels[:, None] - at[:, :, None]) * sharpness[:, None, None]
    dabs = tf.round(_DAB_LEVELS * tf.exp(exponents))
    density = tf.matmul(dabs[:, 1], dabs[:, 0], transpose_b=True)
    # In the middle of a line of evenly spaced dabs the level is 1.
    spacing = glyph_shapes.POINT_SPACING * _STYLE.em_pixels / _STYLE.blur_pixels
    level = density * (spacing / np.sqrt(2 * np.pi) / _DAB_LEVELS**2)
    return _STYLE.blur_pixels * tf.sqrt(-2.0 * tf.math.log(tf.clip_by_value(level, 1e-9, 1.0)))


def _check(*arguments: tuple[str, Any, int, int]) -> None:
    """Refuses, a line each, what is not an integer in [low, high]."""
    problems = [
        f"{name} must be an integer from {low} to {high}, got {value!r}."
        for name, value, low, high in arguments
        if not isinstance(value, int | np.integer)
        or isinstance(value, bool)
        or not low <= value <= high
    ]
    if problems:
        raise ValueError("\n".join(problems))
