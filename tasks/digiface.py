"""DigiFace-1M, rendered faces: an identity is a user, and a class of their own."""

import bisect
import functools
import os
import re
import zipfile
from collections.abc import Iterator, Mapping

import numpy as np

from tasks import cached_task, held_out, preparation
from tasks.image_cache import ExampleTable

# The published parts, and their identities.
PARTS: Mapping[str, range] = {
    f"subjects_{first}-{last}_{images}_imgs": range(first, last + 1)
    for first, last, images in (
        (0, 1999, 72),
        (2000, 3999, 72),
        (4000, 5999, 72),
        (6000, 7999, 72),
        (8000, 9999, 72),
        (100000, 133332, 5),
        (133333, 166665, 5),
        (166666, 199998, 5),
    )
}

# 109,999 by the names of the parts; "110K" where they are announced.
_PUBLISHED_IDENTITIES = sum(map(len, PARTS.values()))
_PAGE = "https://github.com/microsoft/DigiFace1M"

# <identity>/<n>.png, or subj_<identity>/<n>.png, below any folders.
_IMAGE = re.compile(r"(?P<folder>(?:.*/)?(?:subj_)?(?P<identity>\d+))/(?P<number>\d+)\.png", re.A)


class DigiFace(cached_task.CachedTask):
    """Identities that training sees, evaluated on others."""

    name = "digiface"
    licence = (
        "DigiFace-1M is for non-commercial research only, and whoever passes the data on passes "
        f"that on with them; see {_PAGE}"
    )

    def __init__(
        self,
        cache: str,
        *,
        image_size: int = 112,
        digiface_validation_share: float = 0.05,
        digiface_test_share: float = 0.1,
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            image_size: Height and width of the images in pixels.
            digiface_validation_share: Share of the identities that is held out for validation.
            digiface_test_share: Share of the identities that is held out for the test.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of which identities are held out.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        self._shares = _check_shares(digiface_validation_share, digiface_test_share)
        super().__init__(
            cache,
            self.cache_name(image_size=image_size),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def published_users(
        cls, *, digiface_validation_share: float = 0.05, digiface_test_share: float = 0.1
    ) -> int | None:
        """Those of the published identities that are not held out."""
        shares = _check_shares(digiface_validation_share, digiface_test_share)
        return held_out.sizes(_PUBLISHED_IDENTITIES, shares)["train"]

    @classmethod
    def cache_name(cls, *, image_size: int = 112) -> str:
        """The name of the cache folder."""
        cls.image_shape_of(image_size=image_size)
        return f"digiface-{image_size}"

    @classmethod
    def image_shape_of(cls, *, image_size: int = 112) -> tuple[int, int, int]:
        """The shape of the cached images."""
        if problems := cached_task.shape_problems(image_size):
            raise ValueError("\n".join(problems))
        return image_size, image_size, 3

    @classmethod
    def list_source(cls, source: str) -> preparation.Listing:
        """Lists the images of the published zips, or of what they were unpacked to.

        Args:
            source: A folder with the zips or the identities' folders in it, at any depth, or one
                zip. Parts that are not there are not missed.

        Returns:
            The listing. Images are paths relative to `source`, through zips as through folders.

        Raises:
            SourceError: One line, if there is none, a zip is damaged, or an identity is there
                twice.
        """
        root = source if os.path.isdir(source) else os.path.dirname(source)
        homes: dict[int, str] = {}
        found = []
        others = 0
        for path in _walk(source):
            match = _IMAGE.fullmatch(path)
            if not match:
                others += 1
                continue
            identity = int(match["identity"])
            home = homes.setdefault(identity, match["folder"])
            if home != match["folder"]:
                raise preparation.SourceError(
                    f"identity {identity} is in {home} and in {match['folder']}; accepted is each "
                    "once: remove zips that are unpacked, or the folders"
                )
            found.append((identity, int(match["number"]), path))
        if not found:
            raise preparation.SourceError(
                "holds no image of DigiFace-1M (zips, or folders as <identity>/<n>.png): download "
                f"{', '.join(f'{part}.zip' for part in PARTS)}, or some of them, from {_PAGE} into "
                "it"
            )
        found.sort()
        names = {identity: str(identity) for identity in homes}
        examples = [
            preparation.Example(names[identity], names[identity], path)
            for identity, _, path in found
        ]
        # A part's directory is read once: images come in the order of identities.
        open_zip = functools.lru_cache(maxsize=2)(zipfile.ZipFile)

        def read(image: str) -> bytes:
            archive, separator, member = image.rpartition(".zip/")
            if separator:
                return open_zip(os.path.join(root, f"{archive}.zip")).read(member)
            with open(os.path.join(root, image), "rb") as file:
                return file.read()

        return preparation.Listing(
            examples, read, {"digiface_parts": _count_by_part(found), "other_files": others}
        )

    def split(self, table: ExampleTable) -> cached_task.Split:
        """Identities drawn at random are held out."""
        return hold_out(table, self._shares, self.data_seed)

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            **{f"digiface_{name}_share": share for name, share in self._shares.items()},
        }


def hold_out(table: ExampleTable, shares: Mapping[str, float], data_seed: int) -> cached_task.Split:
    """Divides identities, each a user and a class, at random.

    Args:
        table: The images.
        shares: Of the identities, for "validation" and for "test".
        data_seed: Of the draw.

    Raises:
        ValueError: What is lacking, in one line.
    """
    drawn = held_out.draw(np.unique(table.classes), shares, data_seed)
    rows = {name: np.flatnonzero(np.isin(table.classes, part)) for name, part in drawn.items()}
    return cached_task.Split(
        np.unique(table.users[rows["train"]]),
        drawn["train"],
        rows["validation"],
        rows["test"],
        {
            name: f"{len(drawn[name]):,} identities that training has not seen, as users or as "
            "classes, drawn at random"
            for name in shares
        },
    )


def _check_shares(validation: float, test: float) -> dict[str, float]:
    """The two shares by what they are for, once both are checked."""
    problems = [
        f"digiface_{name}_share={share:g}: accepted are shares above 0 and below 1"
        for name, share in (("validation", validation), ("test", test))
        if not 0 < share < 1
    ]
    if not problems and validation + test >= 1:
        problems.append(
            f"digiface_test_share={test:g}: with digiface_validation_share={validation:g} it "
            "leaves nothing to train on; accepted are shares that sum to below 1"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return {"validation": validation, "test": test}


def _walk(source: str) -> Iterator[str]:
    """All files below a folder, relative to it, through zips as through folders."""
    if not os.path.isdir(source):
        yield from _walk_zip(source, os.path.basename(source))
        return
    for folder, folders, names in os.walk(source):
        folders.sort()
        relative = os.path.relpath(folder, source)
        prefix = "" if relative == os.curdir else f"{relative}/"
        for name in names:
            if name.removesuffix(".zip") in PARTS:
                yield from _walk_zip(os.path.join(folder, name), prefix + name)
            else:
                yield prefix + name


def _walk_zip(path: str, shown: str) -> Iterator[str]:
    """All files of a zip."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise preparation.SourceError(
            f"{path}: is cut off or damaged ({error}): download it again from {_PAGE}"
        ) from None
    for name in names:
        if not name.endswith("/"):
            yield f"{shown}/{name}"


def _count_by_part(found: list[tuple[int, int, str]]) -> dict[str, dict[str, int]]:
    """How many identities and images there are of every part, by ranges of identities."""
    identities = [identity for identity, _, _ in found]
    counts = {}
    for part, published in PARTS.items():
        first, last = (
            bisect.bisect_left(identities, edge) for edge in (published.start, published.stop)
        )
        if first < last:
            counts[part] = {
                "identities": len(set(identities[first:last])),
                "images": last - first,
            }
    return counts
