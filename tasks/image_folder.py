"""Your own pictures: a folder, and a manifest that says whose each picture is and what it shows.

The manifest is CSV or Parquet with the columns path, user_id, class_id and, where the split is
yours, split. Ids are text and are kept exactly: "007" and "7" are two users.
"""

import collections
import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from tasks import cached_task, preparation
from tasks.image_cache import ExampleTable

_COLUMNS = ("path", "user_id", "class_id")
_SPLITS = ("train", "validation", "test")
_MANIFESTS = ("manifest.csv", "manifest.parquet")
_MOST_NAMED = 3

# What would make two ids of one, unseen: white space at the ends, and control characters.
_UNCLEAN = re.compile(r"^\s|\s\Z|[\x00-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ABSOLUTE = re.compile(r"/|~|[A-Za-z]:[/\\]|\w+://")


class ImageFolder(cached_task.CachedTask):
    """Pictures in a folder, with a manifest."""

    name = "image_folder"

    def __init__(
        self,
        cache: str,
        *,
        image_size: int = 224,
        image_channels: int = 3,
        dataset_name: str = "own",
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            image_size: Height and width of the images in pixels.
            image_channels: 3 for colour, 1 for grey.
            dataset_name: Which of the prepared sets in `cache`.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of the classes that are held out.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        super().__init__(
            cache,
            self.cache_name(
                dataset_name=dataset_name, image_size=image_size, image_channels=image_channels
            ),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def cache_name(
        cls, *, dataset_name: str = "own", image_size: int = 224, image_channels: int = 3
    ) -> str:
        """The name of the cache folder."""
        cls.image_shape_of(image_size=image_size, image_channels=image_channels)
        if not re.fullmatch(r"\w[\w.-]{0,99}", dataset_name):
            raise ValueError(
                f"dataset_name={dataset_name!r}: accepted are 1 to 100 letters, digits, _ . and -, "
                "the first a letter or a digit"
            )
        grey = "-grey" if image_channels == 1 else ""
        return f"image_folder-{dataset_name}-{image_size}{grey}"

    @classmethod
    def image_shape_of(
        cls, *, image_size: int = 224, image_channels: int = 3
    ) -> tuple[int, int, int]:
        """The shape of the cached images."""
        if problems := cached_task.shape_problems(image_size, image_channels):
            raise ValueError("\n".join(problems))
        return image_size, image_size, image_channels

    @classmethod
    def list_source(
        cls, source: str, *, manifest: str | None = None, data_seed: int = 0
    ) -> preparation.Listing:
        """Lists the pictures that a manifest names.

        Columns besides the known ones are ignored; the facts name them. Whether a split can be had
        is checked here too, before hours of preparation.

        Args:
            source: The folder in which the manifest's paths begin.
            manifest: The manifest; None for manifest.csv or manifest.parquet in `source`.
            data_seed: Of the classes that will be held out.

        Returns:
            The listing; its images are paths as the manifest writes them.

        Raises:
            SourceError: One line that names the manifest, its lines, and what is accepted.
        """
        rows = _read_manifest(_find_manifest(source, manifest))
        root = os.path.realpath(source)
        rows.check_ids()
        _check_paths(rows, root)
        rows.check_users_and_classes()
        try:
            _choose(_as_table(rows), "split" in rows.columns, data_seed)
        except ValueError as error:
            raise preparation.SourceError(f"{rows.path}: {error}") from None

        def read(image: str) -> bytes:
            try:
                with open(os.path.join(root, image), "rb") as file:
                    return file.read()
            except NotADirectoryError:
                raise FileNotFoundError from None

        paths, users, classes = (rows.columns[name] for name in _COLUMNS)
        splits = rows.columns.get("split", ["train"] * len(paths))
        return preparation.Listing(
            list(map(preparation.Example, users, classes, paths, splits)),
            read,
            {
                "manifest": os.path.basename(rows.path),
                "has_split_column": "split" in rows.columns,
                "ignored_columns": rows.ignored,
            },
        )

    def split(self, table: ExampleTable) -> cached_task.Split:
        """The manifest's split, or else classes held out by a seeded draw."""
        return _choose(table, self._cache.facts["source"]["has_split_column"], self.data_seed)


class _Manifest:
    """A manifest's columns, each a list of text with an entry a picture.

    Attributes:
        path: The manifest.
        columns: Columns by name: the three that must be there, and split where it is.
        ignored: Names of further columns.
    """

    def __init__(
        self,
        path: str,
        columns: dict[str, list[str]],
        ignored: list[str],
        place: Callable[[int], str],
    ):
        self.path, self.columns, self.ignored, self._place = path, columns, ignored, place

    def refuse(self, rows: Sequence[int], column: str, reason: str) -> NoReturn:
        """Refuses some rows for what they hold in a column."""
        cells = self.columns[column]
        named = [f"{self.place(row)}: {column}={cells[row]!r:.200}" for row in rows]
        raise preparation.SourceError(f"{self.path}: {_some(named)}: {reason}")

    def place(self, row: int) -> str:
        """How a person finds a row."""
        return self._place(row)

    def check_ids(self) -> None:
        """Refuses cells that hold nothing, or what is not an id or a split."""
        if not self.columns["path"]:
            raise preparation.SourceError(
                f"{self.path}: names no pictures and no users; accepted are manifests with a row "
                "for each picture"
            )
        for column, cells in self.columns.items():
            if not all(cells):
                rows = [row for row, cell in enumerate(cells) if not cell]
                self.refuse(rows, column, "empty; accepted are rows without empty cells")
            pattern = _CONTROL if column == "path" else _UNCLEAN
            if unclean := {cell for cell in set(cells) if pattern.search(cell)}:
                rows = [row for row, cell in enumerate(cells) if cell in unclean]
                self.refuse(
                    rows,
                    column,
                    "accepted is text without control characters"
                    + ("" if column == "path" else " and without white space at its ends"),
                )
        splits = self.columns.get("split", [])
        if not set(splits) <= set(_SPLITS):
            rows = [row for row, cell in enumerate(splits) if cell not in _SPLITS]
            self.refuse(rows, "split", f"accepted are {', '.join(_SPLITS)}")

    def check_users_and_classes(self) -> None:
        """Refuses data of which no private training, or no verification, can be had."""
        users, classes = self.columns["user_id"], self.columns["class_id"]
        if len(set(users)) == 1:
            raise preparation.SourceError(
                f"{self.path}: all {len(users):,} pictures are of user_id={users[0]!r}; accepted "
                "are 2 users or more, since user-level privacy hides one among others"
            )
        if len(set(classes)) == 1:
            raise preparation.SourceError(
                f"{self.path}: all {len(users):,} pictures are of class_id={classes[0]!r}; "
                "accepted are 2 classes or more, since embeddings tell classes apart"
            )
        splits_of: dict[str, set[str]] = {}
        for user, split in set(zip(users, self.columns.get("split", ()), strict=False)):
            splits_of.setdefault(user, set()).add(split)
        divided = [
            f"user_id={user!r} is in {' and '.join(s for s in _SPLITS if s in splits)}"
            for user, splits in sorted(splits_of.items())
            if len(splits) > 1
        ]
        if divided:
            raise preparation.SourceError(
                f"{self.path}: {_some(divided)}; accepted are users with all their pictures in one "
                "split, or drop the column split to hold out classes instead"
            )


def _some(items: Sequence[str]) -> str:
    """The first few of some items, and how many more there are."""
    more = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _find_manifest(source: str, manifest: str | None) -> str:
    """The path of the manifest."""
    if not os.path.isdir(source):
        raise preparation.SourceError(
            "is not a folder; accepted is the folder in which the manifest's paths begin"
        )
    if manifest is None:
        there = [name for name in _MANIFESTS if os.path.lexists(os.path.join(source, name))]
        if len(there) == 2:
            raise preparation.SourceError(
                "holds manifest.csv and manifest.parquet; accepted is one: remove the other, or "
                "name the right one with --manifest"
            )
        if not there:
            raise preparation.SourceError(
                "holds neither manifest.csv nor manifest.parquet, which says with the columns "
                "path,user_id,class_id[,split] whose each picture is and what it shows: write it, "
                "or name it with --manifest"
            )
        manifest = os.path.join(source, there[0])
    if not os.path.isfile(manifest):
        what = "is a folder" if os.path.isdir(manifest) else "does not exist"
        raise preparation.SourceError(
            f"manifest={manifest}: {what}; accepted are CSV and Parquet files"
        )
    return manifest


def _read_manifest(path: str) -> _Manifest:
    """Reads a manifest of either form."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise preparation.SourceError(f"{path}: {error.strerror}") from None
    if data[:4] == b"PAR1":
        return _read_parquet(path, data)
    if path.endswith(".parquet"):
        raise preparation.SourceError(
            f"{path}: is not Parquet, whose files begin with PAR1; accepted are CSV (named .csv) "
            "and Parquet"
        )
    return _read_csv(path, data)


def _read_csv(path: str, data: bytes) -> _Manifest:
    """Reads a manifest of lines of text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start)
        value = error.object.split(b"\n", line + 1)[line].strip(b"\r")[:80]
        raise preparation.SourceError(
            f"{path}: line {line + 1}: {value!r} is not UTF-8; accepted are CSV files encoded as "
            'UTF-8 (spreadsheets call it "CSV UTF-8") and Parquet files'
        ) from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    cells, lines, ragged = [], [], []
    end = 0
    try:
        header = next(filter(None, reader), [])
        end = reader.line_num
        width = len(header)
        for row in reader:
            if row:
                if len(row) != width:
                    ragged.append(f"line {end + 1} has {len(row)}")
                cells += row
                lines.append(end + 1)
            end = reader.line_num
    except csv.Error as error:
        raise preparation.SourceError(
            f"{path}: line {end + 1}: {error}; accepted is CSV with cells in which there are "
            'commas or quotes in "quotes", quotes in them doubled'
        ) from None
    ignored = _check_header(path, header, text)
    if ragged:
        raise preparation.SourceError(
            f"{path}: {_some(ragged)} cells; accepted are {width} in each, as in line 1 (cells in "
            'which there are commas in "quotes")'
        )
    return _Manifest(
        path,
        {name: cells[header.index(name) :: width] for name in header if name not in ignored},
        ignored,
        lambda row: f"line {lines[row]}",
    )


def _read_parquet(path: str, data: bytes) -> _Manifest:
    """Reads a manifest of typed columns."""
    # Only preparation needs it, not every worker of a training.
    import pyarrow as pa
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pa.BufferReader(data))
        header = file.schema_arrow.names
        ignored = _check_header(path, header)
        table = file.read([name for name in header if name not in ignored])
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise preparation.SourceError(
            f"{path}: {reason}; accepted are CSV files and whole Parquet files"
        ) from None
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (
            pa.types.is_integer(kind)
            or pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_null(kind)
        ):
            raise preparation.SourceError(
                f"{path}: column {name} is of type {column.type}; accepted are text and whole "
                "numbers: convert it where it is written"
            )
        try:
            columns[name] = column.cast(pa.string()).to_pylist()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise preparation.SourceError(
                f"{path}: column {name}: {error}; accepted is text in UTF-8"
            ) from None
    return _Manifest(path, columns, ignored, lambda row: f"row {row + 1}")


def _check_header(path: str, header: Sequence[str], text: str = "") -> list[str]:
    """Refuses a header that lacks columns or leaves doubt; returns the columns to ignore."""
    wanted = f"accepted are {','.join(_COLUMNS)}[,split], so written"
    found = ",".join(header[:10]) + (",..." if len(header) > 10 else "")
    missing = [name for name in _COLUMNS if name not in header]
    if not header:
        raise preparation.SourceError(f"{path}: is empty; {wanted}, and a row for each picture")
    if missing:
        for mark, called in ((";", "semicolons"), ("\t", "tabs")):
            if len(header) == 1 and mark in text.partition("\n")[0]:
                raise preparation.SourceError(
                    f"{path}: line 1: its columns are separated by {called}; accepted are commas"
                )
        raise preparation.SourceError(
            f"{path}: column{'s' * (len(missing) > 1)} {', '.join(missing)} missing: found are "
            f"{found!r}; {wanted}"
        )
    known = (*_COLUMNS, "split")
    twice = [n for n, times in collections.Counter(header).items() if times > 1 and n in known]
    if twice:
        raise preparation.SourceError(
            f"{path}: column {twice[0]} is there {header.count(twice[0])} times; accepted is once"
        )
    ignored = [name for name in header if name not in known]
    for name in ignored:
        # Passed over, it would silently let training see what was meant to be held out.
        if re.sub(r"[\W_]", "", name.lower()).rstrip("s") == "split":
            raise preparation.SourceError(
                f"{path}: column {name!r} would be ignored; accepted is the name split, or for a "
                "column that should be ignored another name"
            )
    return ignored


def _check_paths(rows: _Manifest, root: str) -> None:
    """Refuses paths that are not of one file each in a folder, and a folder without any."""
    paths = rows.columns["path"]
    numbered = range(len(paths))
    accepted = "accepted are paths in --source, relative to it, with / between folders"
    for pattern, what in ((_ABSOLUTE, "absolute"), (re.compile(r".*\\"), "written with \\")):
        if refused := [row for row in numbered if pattern.match(paths[row])]:
            rows.refuse(refused, "path", f"{what}; {accepted}")
    folders = _Folders(root)
    files = [folders.find(path) for path in paths]
    if outside := [row for row in numbered if not _is_inside(files[row] + os.sep, root)]:
        rows.refuse(outside, "path", f"leads out of {root}; {accepted}")
    if not_files := [row for row in numbered if files[row] in folders.not_files]:
        rows.refuse(not_files, "path", "is not a file; accepted are paths of picture files")
    _check_repeated(rows, files)
    if folders.found_any:
        return
    first = paths[0]
    message = (
        f"{rows.path}: none of the {len(paths):,} files that it names is there; the first was "
        f"looked for at {os.path.join(root, first)}; "
    )
    for folder in (os.path.dirname(root), os.path.dirname(os.path.realpath(rows.path))):
        if os.path.isfile(os.path.join(folder, first)):
            raise preparation.SourceError(f"{message}it is in {folder}: give that as --source")
    raise preparation.SourceError(
        f"{message}accepted as --source is the folder in which the manifest's paths begin"
    )


def _is_inside(path: str, root: str) -> bool:
    """Whether a real path is below a real folder."""
    return path.startswith(root if root == os.sep else root + os.sep)


class _Folders:
    """Where paths really lead. Looks into every folder once: a stat a picture is too slow.

    Attributes:
        not_files: Real paths found so far that are there and are no files.
        found_any: Whether any file was found so far.
    """

    def __init__(self, root: str):
        self._root = root
        self._seen: dict[str, tuple[str, dict[str, bool]]] = {}
        self.not_files: set[str] = set()
        self.found_any = False

    def find(self, path: str) -> str:
        """The real path of what a path names, whether it is there or not."""
        folder, _, name = path.rpartition("/")
        if folder not in self._seen:
            self._seen[folder] = self._look_into(folder)
        real, entries = self._seen[folder]
        plain = entries.get(name, name not in ("", ".", ".."))
        if not plain:
            return self._find_odd(f"{real}/{name}")
        self.found_any |= name in entries
        return f"{real}/{name}"

    def _look_into(self, folder: str) -> tuple[str, dict[str, bool]]:
        """A folder's real path, and the names in it, with whether each is a file and no link."""
        real = os.path.realpath(os.path.join(self._root, folder))
        entries = {}
        if _is_inside(real + os.sep, self._root):
            try:
                with os.scandir(real) as found:
                    entries = {e.name: e.is_file(follow_symlinks=False) for e in found}
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise preparation.SourceError(f"{real}: {error.strerror}") from None
        return real.rstrip(os.sep), entries

    def _find_odd(self, path: str) -> str:
        """The same for what is a link, or no file."""
        real = os.path.realpath(path)
        if os.path.isfile(real):
            self.found_any = True
        elif os.path.exists(real):
            self.not_files.add(real)
        return real


def _check_repeated(rows: _Manifest, files: Sequence[str]) -> None:
    """Refuses pictures that are named more than once, under whatever path."""
    if len(set(files)) == len(files):
        return
    first: dict[str, int] = {}
    repeated = [(first[f], row) for row, f in enumerate(files) if first.setdefault(f, row) != row]
    for column, reason in (
        (
            "user_id",
            "it would count for two users, and the guarantee of neither would hold: accepted is "
            "one user a picture",
        ),
        ("class_id", "accepted is one class a picture"),
        ("split", "accepted is one split a picture"),
    ):
        cells = rows.columns.get(column)
        if cells and (pairs := [(a, b) for a, b in repeated if cells[a] != cells[b]]):
            a, b = pairs[0]
            _refuse_pairs(
                rows, pairs, f"with {column}={cells[a]!r} and {column}={cells[b]!r}: {reason}"
            )
    _refuse_pairs(rows, repeated, "accepted is one row a picture: remove the repetitions")


def _refuse_pairs(rows: _Manifest, pairs: Sequence[tuple[int, int]], reason: str) -> NoReturn:
    """Refuses pictures that are named twice."""
    a, b = pairs[0]
    paths = rows.columns["path"]
    named = f"path={paths[a]!r}" + (f" and {paths[b]!r}" if paths[b] != paths[a] else "")
    count = f"{len(pairs):,} rows repeat a picture, first " if len(pairs) > 1 else ""
    raise preparation.SourceError(
        f"{rows.path}: {count}{rows.place(a)} and {rows.place(b)}: {named} is one file, named "
        f"twice, {reason}"
    )


def _as_table(rows: _Manifest) -> ExampleTable:
    """What the cache will hold if nothing is missing."""
    numbers, names = [], []
    for column in ("user_id", "class_id"):
        cells = rows.columns[column]
        names.append(preparation.in_order(set(cells)))
        number = {name: i for i, name in enumerate(names[-1])}
        numbers.append(np.fromiter(map(number.__getitem__, cells), np.int64, len(cells)))
    count = len(numbers[0])
    splits = np.array(rows.columns.get("split", ["train"] * count), object)
    return ExampleTable(np.arange(count), *numbers, splits, *names)


def _choose(table: ExampleTable, given: bool, data_seed: int) -> cached_task.Split:
    """The split of a table, checked.

    Args:
        table: The images.
        given: Whether the manifest had a split column.
        data_seed: Of the draw where it had none.

    Raises:
        ValueError: What is lacking, in one line.
    """
    split = _given(table) if given else _hold_out_classes(table, data_seed)
    if len(split.train_users) < 2 or len(split.train_classes) < 2:
        remedy = "" if given else ", by another --data_seed or a column split of your own"
        raise ValueError(
            f"training is left {len(split.train_users)} users and {len(split.train_classes)} "
            f"classes; accepted are 2 of each or more{remedy}"
        )
    return split


def _given(table: ExampleTable) -> cached_task.Split:
    """The split that the manifest says."""
    train, validation, test = (np.flatnonzero(table.splits == split) for split in _SPLITS)
    for name, rows in (("validation", validation), ("test", test)):
        paired = int(np.count_nonzero(np.bincount(table.classes[rows]) >= 2))
        if paired < 2:
            raise ValueError(
                f"split {name} has {len(rows)} pictures, and {paired} classes with 2 of them; "
                "accepted are 2 such classes or more, since verification compares pictures of one "
                "class and of two"
            )
    classes = np.unique(table.classes[train])

    def describe(rows: np.ndarray) -> str:
        held_out = np.unique(table.classes[rows])
        seen = int(np.isin(held_out, classes).sum())
        return (
            f"{len(held_out):,} classes, {f'{seen:,}' if seen else 'none'} of which training has "
            f"seen, of {len(np.unique(table.users[rows])):,} users, none of them in training; as "
            "the manifest says"
        )

    return cached_task.Split(
        np.unique(table.users[train]),
        classes,
        validation,
        test,
        {"validation": describe(validation), "test": describe(test)},
    )


def _hold_out_classes(table: ExampleTable, data_seed: int) -> cached_task.Split:
    """About 10 % of the classes for validation and 20 % for the test, drawn at random."""
    counts = np.bincount(table.classes, minlength=len(table.class_names))
    classes = np.flatnonzero(counts)
    for_validation, for_test = (max(2, round(share * len(classes))) for share in (0.1, 0.2))
    paired = int(np.count_nonzero(counts >= 2))
    if paired < 4 or len(classes) < for_validation + for_test + 2:
        raise ValueError(
            f"has {len(classes)} classes, {paired} of them with 2 pictures or more; accepted are 6 "
            "and 4 or more: 2 classes with 2 pictures are held out for validation and 2 for the "
            "test, and 2 classes are trained on"
        )
    drawn = np.random.default_rng(data_seed).permutation(classes)
    # The first four that can serve serve in two and two; the others as they come.
    first = drawn[counts[drawn] >= 2][:4]
    others = drawn[~np.isin(drawn, first)]
    held_out = {
        "validation": np.concatenate([first[:2], others[: for_validation - 2]]),
        "test": np.concatenate([first[2:], others[for_validation - 2 :][: for_test - 2]]),
    }
    train_classes = np.setdiff1d(classes, np.concatenate(list(held_out.values())))
    train_users = np.unique(table.users[np.isin(table.classes, train_classes)])
    rows = {name: np.flatnonzero(np.isin(table.classes, c)) for name, c in held_out.items()}

    def describe(name: str) -> str:
        users = np.unique(table.users[rows[name]])
        shared = int(np.isin(users, train_users).sum())
        return (
            f"{len(held_out[name]):,} classes that training has not seen, of {len(users):,} users, "
            f"{f'{shared:,}' if shared else 'none'} of them in training"
        )

    return cached_task.Split(
        train_users,
        train_classes,
        rows["validation"],
        rows["test"],
        {name: describe(name) for name in held_out},
    )
