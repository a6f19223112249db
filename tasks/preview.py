"""Draws a contact sheet of a task: one row of images a user, in the order of their classes.

python -m tasks.preview --task=glyphs --output=glyphs.png
"""

from collections.abc import Sequence

import numpy as np
from absl import flags
from PIL import Image, ImageDraw, ImageFont

from tasks import flags as task_flags
from tasks.task import Task
from tff_dpfedemb import atomic, command_line

task_flags.define_task_flags()
_OUTPUT = flags.DEFINE_string("output", "preview.png", "PNG file to write.")
_PREVIEW_USERS = flags.DEFINE_integer("preview_users", 8, "Rows: users shown.", lower_bound=1)
_PREVIEW_IMAGES = flags.DEFINE_integer(
    "preview_images", 20, "Columns: images shown of each user, at most.", lower_bound=1
)
_SPLIT = flags.DEFINE_enum("split", "train", ["train", "validation", "test"], "Split to show.")

_Row = tuple[str, np.ndarray, np.ndarray]  # User, images, class ids.
_PAGE, _TILE, _TEXT, _FAINT = "#16181d", "#000000", "#e8eaed", "#9aa0a6"
_TILE_PIXELS, _GAP, _CLASS_GAP, _MARGIN, _FONT_PIXELS = 56, 2, 10, 16, 14


def user_rows(task: Task, split: str, num_rows: int) -> list[_Row]:
    """Reads the images of some users, spread over the whole split.

    Args:
        task: The data set.
        split: "train", "validation" or "test".
        num_rows: The most users to read.

    Returns:
        For each user their name, their images of shape (n, height, width, channels), uint8, and
        the class ids of shape (n,), ordered by class.
    """
    if split == "train":
        indices = np.unique(np.linspace(0, task.num_users - 1, num_rows).astype(np.int64))
        users = task.user_ids(indices)
        # One at a time, since nothing marks where one user's examples end.
        loaded = [task.load_users(users[i : i + 1]) for i in range(len(users))]
        examples = [(images.numpy(), class_ids.numpy()) for images, class_ids in loaded]
    else:
        held_out = task.evaluation_set(split)
        # Where images are nobody's, a row is a class.
        owners = held_out.class_ids if held_out.user_ids is None else held_out.user_ids
        users = np.unique(owners)
        users = users[np.unique(np.linspace(0, len(users) - 1, num_rows).astype(np.int64))]
        examples = [
            (held_out.images[owners == user], held_out.class_ids[owners == user]) for user in users
        ]
        if held_out.user_ids is None:
            return [
                (f"class {user}", images, class_ids)
                for user, (images, class_ids) in zip(users, examples, strict=True)
            ]
    rows = []
    for user, (images, class_ids) in zip(users, examples, strict=True):
        order = np.argsort(class_ids, kind="stable")
        rows.append((task.user_name(user), images[order], class_ids[order]))
    return rows


def contact_sheet(title: str, rows: Sequence[_Row], max_images: int) -> Image.Image:
    """Lays out rows of images below a title, users' names at the left.

    Args:
        title: One line.
        rows: As `user_rows` returns them.
        max_images: The most images of a row.

    Returns:
        An RGB picture.
    """
    font = ImageFont.load_default(_FONT_PIXELS)
    names_width = max(int(font.getlength(name)) for name, _, _ in rows) + _MARGIN
    left, top = _MARGIN + names_width, 2 * _MARGIN + _FONT_PIXELS
    columns = []  # Of each row, where its tiles begin.
    for _, _, class_ids in rows:
        new_class = np.diff(class_ids[:max_images], prepend=class_ids[:1]) != 0
        columns.append(
            left
            + np.arange(len(new_class)) * (_TILE_PIXELS + _GAP)
            + np.cumsum(new_class) * _CLASS_GAP
        )
    right = max(max(tiles, default=left) for tiles in columns) + _TILE_PIXELS
    width = max(int(right), _MARGIN + int(font.getlength(title))) + _MARGIN
    row_height = _TILE_PIXELS + _CLASS_GAP
    sheet = Image.new("RGB", (width, top + len(rows) * row_height + _MARGIN - _CLASS_GAP), _PAGE)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN), title, _TEXT, font, anchor="lt")
    for row, ((name, images, _), tiles) in enumerate(zip(rows, columns, strict=True)):
        y = top + row * row_height
        pen.text((left - _MARGIN, y + _TILE_PIXELS / 2), name, _FAINT, font, anchor="rm")
        for x, pixels in zip(tiles, images, strict=False):
            picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            scale = _TILE_PIXELS / max(picture.size)
            picture = picture.resize([round(side * scale) for side in picture.size])
            sheet.paste(picture.convert("RGB"), (int(x), y))
    return sheet


def main() -> int:
    """Writes the contact sheet that the flags ask for."""
    command_line.be_quiet()
    problems = command_line.Problems()
    task = problems.attempt(task_flags.build_task)
    problems.exit_if_any()
    output = _OUTPUT.value
    try:
        with atomic.replacing(output) as new:  # Before the work, to fail early.
            rows = user_rows(task, _SPLIT.value, _PREVIEW_USERS.value)
            title = f"{task.name}, {_SPLIT.value}"
            contact_sheet(title, rows, _PREVIEW_IMAGES.value).save(new, "PNG")
    except OSError as error:
        command_line.fail(f"error: --output={output}: cannot be written: {error.strerror}")
    print(f"Wrote {output}")
    return command_line.DONE


if __name__ == "__main__":
    command_line.run(main)
