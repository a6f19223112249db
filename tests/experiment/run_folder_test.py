"""A run folder belongs to one run and to one process at a time."""

import json
import os
import tempfile

from absl.testing import absltest, parameterized

from tff_dpfedemb.experiment import run_folder

_FLAGS = {"total_rounds": 3, "delta": None, "client_lr": 0.1}


class RunFolderTest(parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.parent = self.enterContext(tempfile.TemporaryDirectory())
        self.path = os.path.join(self.parent, "runs", "first")

    def _folder(self) -> run_folder.RunFolder:
        return run_folder.RunFolder(self.path)

    def _write(self, name: str, content: str) -> None:
        os.makedirs(self.path, exist_ok=True)
        with open(os.path.join(self.path, name), "w", encoding="utf-8") as file:
            file.write(content)

    def test_check_writes_nothing(self) -> None:
        self._folder().check(_FLAGS, 1)
        self.assertEmpty(os.listdir(self.parent))

    def test_open_creates_and_reopens(self) -> None:
        folder = self._folder()
        self.assertEqual(folder.open(_FLAGS, 5), 5)
        self.assertCountEqual(os.listdir(self.path), ["flags.json", "lock", "secret_seed"])
        with open(folder.file("flags.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), _FLAGS)
        del folder
        self.assertEqual(self._folder().open(_FLAGS, 5), 5)

    def test_opened_by_one_at_a_time(self) -> None:
        first = self._folder()
        first.open(_FLAGS)
        with self.assertRaisesRegex(run_folder.RunFolderError, "another process is running in"):
            self._folder().open(_FLAGS)
        del first
        self._folder().open(_FLAGS)

    def test_names_every_flag_that_differs(self) -> None:
        self._folder().open(_FLAGS)
        other = {"total_rounds": 4, "client_lr": 0.1, "delta": None, "new": True}
        with self.assertRaises(run_folder.RunFolderError) as caught:
            self._folder().check(other)
        message = str(caught.exception)
        self.assertIn("total_rounds was 3 and is 4", message)
        self.assertIn("new was None and is True", message)
        self.assertNotIn("client_lr", message)
        self.assertNotIn("\n", message)

    def test_seed_is_drawn_once_and_only_its_owner_can_read_it(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        folder = self._folder()
        seed = folder.open(_FLAGS)
        self.assertEqual(os.stat(folder.file("secret_seed")).st_mode & 0o777, 0o600)
        # Two draws of 128 bits agree, and one is below 2^64, with probability 2^-64 or less.
        self.assertGreater(seed, 2**64)
        del folder
        self.assertEqual(self._folder().open(_FLAGS), seed)
        self.path += "_other"
        self.assertNotEqual(self._folder().open(_FLAGS), seed)

    def test_a_given_seed_is_kept_and_not_written_where_others_read(self) -> None:
        folder = self._folder()
        folder.open(_FLAGS, 1234567)
        self.assertEqual(os.stat(folder.file("secret_seed")).st_mode & 0o777, 0o600)
        with open(folder.file("flags.json"), encoding="utf-8") as file:
            self.assertNotIn("1234567", file.read())
        del folder
        self.assertEqual(self._folder().open(_FLAGS, None), 1234567)

    def test_another_seed_is_refused_without_telling_it(self) -> None:
        self._folder().open(_FLAGS, 1234567)
        with self.assertRaisesRegex(run_folder.RunFolderError, "^seed: ") as caught:
            self._folder().check(_FLAGS, 0)
        self.assertNotIn("1234567", str(caught.exception))

    @parameterized.parameters("photo.jpg", "ledger.jsonl", ".hidden")
    def test_foreign_content_is_refused(self, name: str) -> None:
        self._write(name, "x")
        with self.assertRaisesRegex(run_folder.RunFolderError, "holds something that is not a run"):
            self._folder().check(_FLAGS)

    def test_an_empty_folder_and_one_whose_opening_was_killed_are_accepted(self) -> None:
        os.makedirs(os.path.join(self.path, ".flags.json.abc.partial"))
        self._write("lock", "")
        self._folder().open(_FLAGS)
        self.assertCountEqual(os.listdir(self.path), ["flags.json", "lock", "secret_seed"])

    def test_open_removes_what_a_killed_process_left(self) -> None:
        self._folder().open(_FLAGS)
        os.makedirs(os.path.join(self.path, ".export.abc.partial", "export"))
        self._folder().open(_FLAGS)
        self.assertCountEqual(os.listdir(self.path), ["flags.json", "lock", "secret_seed"])

    @parameterized.parameters(
        ("flags.json", "not JSON"),
        ("flags.json", "[]"),
        ("flags.json", ""),
        ("secret_seed", "not a number"),
        ("secret_seed", '"7"'),
    )
    def test_a_spoilt_file_is_named(self, name: str, content: str) -> None:
        self._folder().open(_FLAGS)
        self._write(name, content)
        with self.assertRaisesRegex(run_folder.RunFolderError, f"{name} is not of a run"):
            self._folder().check(_FLAGS)

    def test_a_file_in_the_way_is_named(self) -> None:
        self._write("a_file", "x")
        for path in ("a_file", os.path.join("a_file", "below", "it")):
            folder = run_folder.RunFolder(os.path.join(self.path, path))
            with self.assertRaisesRegex(run_folder.RunFolderError, "a_file is not a folder"):
                folder.check(_FLAGS)

    def test_another_process_that_came_first_is_noticed(self) -> None:
        class Raced(run_folder.RunFolder):
            """Somebody else opens the folder, and ends, between check and lock."""

            def check(self, flags, seed=None):
                super().check(flags, seed)
                if not os.path.exists(self.path):
                    run_folder.RunFolder(self.path).open({"total_rounds": 9})

        with self.assertRaisesRegex(run_folder.RunFolderError, "total_rounds was 9 and is 3"):
            Raced(self.path).open(_FLAGS)


class PublicSeedTest(parameterized.TestCase):
    def test_is_a_function_of_the_seed_alone(self) -> None:
        self.assertEqual(run_folder.derive_public_seed(1), run_folder.derive_public_seed(1))

    def test_fits_31_bits_and_spreads(self) -> None:
        # 1,000 draws out of 2^31 hold 20 pairs or more with probability below 10^-30.
        seeds = [run_folder.derive_public_seed(s) for s in [*range(999), 2**128]]
        self.assertBetween(min(seeds), 0, 2**31 - 1)
        self.assertBetween(max(seeds), 2**30, 2**31 - 1)
        self.assertGreater(len(set(seeds)), 980)
        self.assertNoCommonElements(seeds, range(1000))


if __name__ == "__main__":
    absltest.main()
