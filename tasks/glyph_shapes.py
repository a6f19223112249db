"""The distinct shapes among the Hershey fonts' stroke glyphs: the classes of `tasks.glyphs`.

A shape is a list of points spread evenly along the strokes of one glyph, in em units: the middle of
the bounding box at (0, 0), its larger side 2 long, y pointing down. Glyphs that look alike in two
fonts are one shape, the first one. Which glyph is which class is read from `glyph_shapes.json`
beside this file and never decided at run time, so class ids do not depend on a machine's rounding.
`python -m tasks.glyph_shapes` writes that file anew.

The shapes are split into training, validation and test classes at random and by shape alone: an A
of one font may be trained on and a differently shaped A of another be a test class.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import app

from tff_dpfedemb import atomic

POINTS_PER_SHAPE = 160
# In em units, about one pixel of a 28x28 image: close enough for the points to fuse into a line.
POINT_SPACING = 0.1
# Where the unused points of a shape lie: so far out that they leave no ink.
PADDING = 99.0
MAX_SIMILARITY = 0.85
SPLIT_FRACTIONS = {"train": 0.7, "validation": 0.1, "test": 0.2}

_TABLE_PATH = pathlib.Path(__file__).with_suffix(".json")
_PACKAGE = "Hershey-Fonts"
_CAP_HEIGHT = 21.0  # Of most of the fonts, in their own units.
_MAX_ENLARGEMENT = 2.0
_PLAIN_BLUR = 0.05  # In em units: the pen with which shapes are compared.
_SPLIT_SEED = 20230611
_Strokes = list[list[tuple[int, int]]]
_Key = tuple[str, int]  # Font name, character code.


@dataclasses.dataclass(frozen=True)
class ShapeTable:
    """Which glyph of which font is which class.

    Attributes:
        strokes_sha256: Digest of all strokes the table was made from.
        split_sizes: Number of classes of each split. Class ids count through the training classes
            first, then the validation and the test classes.
        kept: The (font, character code) whose strokes draw each class, by class id.
        duplicates: For each glyph left out because it looks like a kept one: the class id of the
            kept one, and the cosine similarity of the two.
        too_long: The glyphs left out because `POINTS_PER_SHAPE` points do not cover their strokes.
    """

    strokes_sha256: str
    split_sizes: Mapping[str, int]
    kept: tuple[_Key, ...]
    duplicates: Mapping[_Key, tuple[int, float]]
    too_long: tuple[_Key, ...]

    def class_ids(self, split: str) -> range:
        """The class ids of a split.

        Args:
            split: "train", "validation" or "test".

        Returns:
            A range of class ids.
        """
        sizes = list(self.split_sizes.values())
        position = list(self.split_sizes).index(split)
        start = sum(sizes[:position])
        return range(start, start + sizes[position])


@functools.cache
def load_table() -> ShapeTable:
    """Reads the committed table; needs neither the fonts nor TensorFlow.

    Returns:
        The table.
    """
    raw = json.loads(_TABLE_PATH.read_text())
    kept, duplicates, too_long = {}, {}, []
    for font, decisions in raw["glyphs"].items():
        for code, *decision in decisions:
            if len(decision) == 2:
                duplicates[font, code] = (decision[0], decision[1])
            elif decision:
                kept[decision[0]] = (font, code)
            else:
                too_long.append((font, code))
    return ShapeTable(
        strokes_sha256=raw["strokes_sha256"],
        split_sizes=raw["split_sizes"],
        kept=tuple(kept[class_id] for class_id in range(len(kept))),
        duplicates=duplicates,
        too_long=tuple(too_long),
    )


@functools.cache
def load_shapes() -> np.ndarray:
    """The points of every class, from the installed fonts.

    Returns:
        Read-only float32 array of shape (classes, POINTS_PER_SHAPE, 2), x and y in em units; unused
        points are at `PADDING`.

    Raises:
        RuntimeError: If the installed fonts are not those the table was made from.
    """
    table = load_table()
    strokes = read_strokes()
    if _digest(strokes) != table.strokes_sha256:
        raise RuntimeError(
            f"The strokes of the installed {_PACKAGE} {package_version()} are not those that "
            f"{_TABLE_PATH.name} was made from; install the version that requirements.txt names."
        )
    shapes = np.stack([shape_points(strokes[key]) for key in table.kept])
    shapes.flags.writeable = False
    return shapes


def package_version() -> str:
    """The installed version of the fonts' package."""
    return importlib.metadata.version(_PACKAGE)


def read_strokes() -> dict[_Key, _Strokes]:
    """All glyphs of all fonts that have any ink.

    Returns:
        The pen strokes, polylines in the fonts' own integer units, by (font, character code), in
        the package's order.
    """
    # Here, because the table alone is read where only the number of classes is asked for.
    from HersheyFonts import HersheyFonts

    fonts = HersheyFonts()
    strokes = {}
    for font in fonts.default_font_names:
        fonts.load_default_font(font)
        for character, glyph in sorted(fonts.all_glyphs.items()):
            drawn = [list(stroke) for stroke in glyph.strokes if len(stroke) > 1]
            if drawn:
                strokes[font, ord(character)] = drawn
    return strokes


def shape_points(strokes: _Strokes) -> np.ndarray | None:
    """Spreads points evenly along the strokes of a glyph, scaled to the em box.

    Small marks are enlarged by no more than 2 relative to a capital letter: a dot stays a dot.

    Args:
        strokes: Polylines in the fonts' own units.

    Returns:
        float32 array of shape (POINTS_PER_SHAPE, 2) in em units, or None if the strokes are too
        long for so many points.
    """
    corners = np.concatenate(strokes).astype(float)
    low, high = corners.min(axis=0), corners.max(axis=0)
    scale = 2.0 / max((high - low).max(), _CAP_HEIGHT / _MAX_ENLARGEMENT)
    points = []
    for stroke in strokes:
        line = (np.array(stroke) - (low + high) / 2) * scale
        travelled = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(line, axis=0).T))])
        count = max(1, int(np.ceil(travelled[-1] / POINT_SPACING)))
        # Each point stands for the piece of line around it, so none lies at the very end.
        at = (np.arange(count) + 0.5) * (travelled[-1] / count)
        points.append(np.stack([np.interp(at, travelled, line[:, axis]) for axis in (0, 1)], 1))
    points = np.concatenate(points)
    if len(points) > POINTS_PER_SHAPE:
        return None
    padding = np.full((POINTS_PER_SHAPE - len(points), 2), PADDING)
    return np.concatenate([points, padding]).astype(np.float32)


def plain_images(shapes: np.ndarray, size: int = 28) -> np.ndarray:
    """Draws shapes without any style, with a slightly blurred pen, to compare them.

    Args:
        shapes: Array of shape (n, POINTS_PER_SHAPE, 2), in em units.
        size: Width and height in pixels; the em box is 5/7 of it.

    Returns:
        float32 array of shape (n, size, size), 0 for paper and 1 for ink.
    """
    pixels = (np.arange(size) - (size - 1) / 2) / (size * 5 / 14)
    # Gaussian dabs factor into a column and a row each, so a drawing is a product of matrices.
    dabs = np.exp(-((pixels - shapes[..., None]) ** 2) / (2 * _PLAIN_BLUR**2))
    ink = np.swapaxes(dabs[:, :, 1], 1, 2) @ dabs[:, :, 0]
    return np.minimum(1.0, ink * (POINT_SPACING / (_PLAIN_BLUR * np.sqrt(2 * np.pi)))).astype(
        np.float32
    )


def build_table() -> dict[str, Any]:
    """Decides anew which glyphs are distinct shapes and splits these into classes.

    In the package's order a glyph is kept if its plain image has a cosine similarity below
    `MAX_SIMILARITY` to all that are kept already.

    Returns:
        What `glyph_shapes.json` holds: per font, `[code, class_id]` for a kept glyph,
        `[code, class_id, similarity]` for one like that class, `[code]` for one too long.
    """
    strokes = read_strokes()
    points = {key: shape_points(lines) for key, lines in strokes.items()}
    keys = [key for key in points if points[key] is not None]
    images = plain_images(np.stack([points[key] for key in keys])).reshape(len(keys), -1)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    similarities = images @ images.T
    kept, nearest = [], {}
    for index in range(len(keys)):
        if kept:
            most_alike = kept[np.argmax(similarities[index, kept])]
            if similarities[index, most_alike] >= MAX_SIMILARITY:
                nearest[index] = most_alike
                continue
        kept.append(index)

    sizes, class_ids_of_kept = split_classes(len(kept))
    class_ids = dict(zip(kept, class_ids_of_kept, strict=True))
    glyphs = {font: [] for font, _ in strokes}
    positions = {key: index for index, key in enumerate(keys)}
    for key in strokes:
        index = positions.get(key)
        if index is None:
            decision = []
        elif index in nearest:
            similarity = round(float(similarities[index, nearest[index]]), 4)
            decision = [class_ids[nearest[index]], similarity]
        else:
            decision = [class_ids[index]]
        glyphs[key[0]].append([key[1], *decision])
    return {"strokes_sha256": _digest(strokes), "split_sizes": sizes, "glyphs": glyphs}


def split_classes(num_shapes: int) -> tuple[dict[str, int], list[int]]:
    """Assigns shapes to splits at random and numbers them.

    Args:
        num_shapes: How many shapes there are.

    Returns:
        The number of classes of each split, and the class id of each shape. Within a split the
        order of the shapes stays, so that neighbouring ids are often of one font.
    """
    sizes = {name: round(share * num_shapes) for name, share in SPLIT_FRACTIONS.items()}
    sizes["train"] = num_shapes - sizes["validation"] - sizes["test"]
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(num_shapes)
    parts = np.split(shuffled, np.cumsum(list(sizes.values()))[:-1])
    shape_of_class = np.concatenate([np.sort(part) for part in parts])
    return sizes, np.argsort(shape_of_class).tolist()


def _digest(strokes: Mapping[_Key, _Strokes]) -> str:
    """SHA-256 of every glyph's name and strokes."""
    return hashlib.sha256(json.dumps(list(strokes.items())).encode()).hexdigest()


def main(argv: list[str]) -> None:
    """Writes `glyph_shapes.json`."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are accepted, got {argv[1:]}")
    table = build_table()
    fonts = ",\n".join(
        f"{json.dumps(font)}: {json.dumps(decisions, separators=(',', ':'))}"
        for font, decisions in table.pop("glyphs").items()
    )
    head = json.dumps(table, indent=1).removesuffix("\n}")
    atomic.write_text(str(_TABLE_PATH), f'{head},\n "glyphs": {{\n{fonts}\n}}}}\n')
    print(f"{_TABLE_PATH}: {sum(table['split_sizes'].values())} classes {table['split_sizes']}")


if __name__ == "__main__":
    app.run(main)
