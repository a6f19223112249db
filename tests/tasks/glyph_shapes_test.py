"""Tests of the committed table of shapes, against the fonts it was made from."""

import dataclasses
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest

from tasks import glyph_shapes

# Cosine similarities of one pair of drawings may differ by so much between machines.
_ROUNDING = 1e-3


class CommittedTableTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.table = glyph_shapes.load_table()
        strokes = glyph_shapes.read_strokes()
        points = {key: glyph_shapes.shape_points(lines) for key, lines in strokes.items()}
        cls.keys = list(strokes)
        cls.drawable = [key for key in cls.keys if points[key] is not None]
        images = glyph_shapes.plain_images(np.stack([points[key] for key in cls.drawable]))
        images = images.reshape(len(images), -1)
        images /= np.linalg.norm(images, axis=1, keepdims=True)
        cls.similarities = images @ images.T
        cls.position = {key: index for index, key in enumerate(cls.drawable)}

    def test_decides_every_glyph_once(self):
        decided = [*self.table.kept, *self.table.duplicates, *self.table.too_long]
        self.assertCountEqual(decided, self.keys)
        self.assertGreater(len(self.table.kept), 800)

    def test_too_long_are_those_without_points(self):
        self.assertCountEqual(self.table.too_long, set(self.keys) - set(self.drawable))

    def test_no_two_kept_shapes_look_alike(self):
        kept = [self.position[key] for key in self.table.kept]
        among_kept = self.similarities[np.ix_(kept, kept)] - np.eye(len(kept))
        self.assertLess(among_kept.max(), glyph_shapes.MAX_SIMILARITY + _ROUNDING)

    def test_every_duplicate_looks_like_the_kept_shape_it_names(self):
        kept = np.array([self.position[key] for key in self.table.kept])
        for key, (class_id, similarity) in self.table.duplicates.items():
            index = self.position[key]
            to_earlier = np.where(kept < index, self.similarities[index, kept], -1.0)
            self.assertAlmostEqual(to_earlier[class_id], similarity, delta=_ROUNDING, msg=key)
            self.assertLess(to_earlier.max(), similarity + _ROUNDING, msg=key)
            self.assertGreater(similarity, glyph_shapes.MAX_SIMILARITY - _ROUNDING, msg=key)

    def test_split_is_the_seeded_permutation_of_the_kept_shapes(self):
        in_order = sorted(self.table.kept, key=self.position.get)
        sizes, class_ids = glyph_shapes.split_classes(len(in_order))
        self.assertEqual(self.table.split_sizes, sizes)
        for key, class_id in zip(in_order, class_ids, strict=True):
            self.assertEqual(self.table.kept[class_id], key)

    def test_splits_partition_the_classes_in_the_stated_shares(self):
        splits = [self.table.class_ids(name) for name in ("train", "validation", "test")]
        every_id = [class_id for split in splits for class_id in split]
        self.assertEqual(every_id, list(range(len(self.table.kept))))
        shares = [len(split) / len(every_id) for split in splits]
        np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=1e-3)

    def test_writing_the_table_anew_changes_nothing(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = folder / "table.json"
        self.addCleanup(glyph_shapes.load_table.cache_clear)
        glyph_shapes.load_table.cache_clear()
        with mock.patch.object(glyph_shapes, "_TABLE_PATH", path):
            glyph_shapes.main([""])
            written = glyph_shapes.load_table()
        self.assertEqual(list(folder.iterdir()), [path])
        self.assertEqual(written.strokes_sha256, self.table.strokes_sha256)
        changed = [
            key
            for key in self.drawable
            if (key in written.duplicates) != (key in self.table.duplicates)
        ]
        if changed:  # Excused if the first change, from which others follow, is due to rounding.
            index = self.position[changed[0]]
            earlier = [self.position[key] for key in self.table.kept if self.position[key] < index]
            nearest = self.similarities[index, earlier].max()
            self.assertAlmostEqual(nearest, glyph_shapes.MAX_SIMILARITY, delta=_ROUNDING)
        else:
            self.assertEqual(written.kept, self.table.kept)
            self.assertEqual(written.split_sizes, self.table.split_sizes)
            self.assertEqual(written.too_long, self.table.too_long)

    def test_shapes_fill_the_em_box(self):
        shapes = glyph_shapes.load_shapes()
        used = shapes[..., 0] != glyph_shapes.PADDING
        self.assertTrue((used.sum(axis=1) > 0).all())
        self.assertLessEqual(np.abs(shapes[used]).max(), 1.0)
        capital = shapes[self.table.kept.index(("futural", ord("H")))]
        self.assertGreater(np.abs(capital[capital != glyph_shapes.PADDING]).max(), 0.94)
        dot = shapes[self.table.kept.index(("futural", ord(".")))]
        self.assertLess(np.abs(dot[dot != glyph_shapes.PADDING]).max(), 0.25)

    def test_other_strokes_than_the_tables_are_refused(self):
        other = dataclasses.replace(self.table, strokes_sha256="0" * 64)
        with (
            mock.patch.object(glyph_shapes, "load_table", return_value=other),
            self.assertRaisesRegex(RuntimeError, "Hershey-Fonts .* are not those"),
        ):
            glyph_shapes.load_shapes.__wrapped__()

    def test_number_of_classes_needs_neither_tensorflow_nor_fonts(self):
        code = (
            "import sys; from tasks import registry; import tasks.glyphs;"
            "print(registry.build('glyphs').num_train_classes);"
            "assert not {'tensorflow', 'HersheyFonts'} & set(sys.modules)"
        )
        printed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        self.assertEqual(int(printed), len(self.table.class_ids("train")))


class ShapePointsTest(absltest.TestCase):
    def test_points_are_evenly_spread_and_centred(self):
        points = glyph_shapes.shape_points([[(3, 5), (24, 5)]])
        used = points[points[:, 0] != glyph_shapes.PADDING]
        np.testing.assert_allclose(used[:, 0], np.arange(20) * 0.1 - 0.95, atol=1e-6)
        np.testing.assert_allclose(used[:, 1], 0.0, atol=1e-6)

    def test_spacing_ignores_how_a_line_is_cut(self):
        whole = glyph_shapes.shape_points([[(0, 0), (21, 21)]])
        cut = glyph_shapes.shape_points([[(0, 0), (1, 1), (20, 20), (21, 21)]])
        np.testing.assert_allclose(whole, cut, atol=1e-6)

    def test_small_marks_stay_small(self):
        points = glyph_shapes.shape_points([[(0, 0), (2, 0)]])
        used = points[points[:, 0] != glyph_shapes.PADDING]
        self.assertLess(np.ptp(used[:, 0]), 2 * 2.0 * 2 / 21)

    def test_too_long_has_no_points(self):
        self.assertIsNone(glyph_shapes.shape_points([[(0, y), (21, y)] for y in range(22)]))


if __name__ == "__main__":
    absltest.main()
