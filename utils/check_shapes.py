"""The world of the tiny FLUX checkpoint: its prompts, its drawings, and a strict reader of pictures.

Prompts read "a [small |large ]{colour} {shape} on a {background} background"; without a size word the size is
medium. Nothing here is learned: a picture is read by comparing it with drawings of each shape.

    python utils/check_shapes.py FOLDER    # each PNG with a JSON beside it that holds its "prompt"
"""

import argparse
import json
import math
import random
import re
import sys
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw


SIDE = 128
PALETTE = {
    "red": (215, 40, 40),
    "orange": (245, 130, 25),
    "yellow": (245, 215, 40),
    "green": (40, 160, 70),
    "blue": (40, 70, 210),
    "purple": (150, 45, 190),
    "white": (248, 248, 248),
    "black": (15, 15, 15),
}
COLOURS = tuple(PALETTE)
BACKGROUNDS = ("white", "black", "blue", "green", "yellow")
SIZES = {"small": 0.17, "medium": 0.25, "large": 0.36}  # the radius, as a part of the picture's side
HELD_OUT_TRIPLES = 32


def _regular(points: int, radius: float, inner: float | None = None) -> list[tuple[float, float]]:
    """The corners of an upright regular polygon, or with `inner` of a star."""
    radii = [radius] if inner is None else [radius, inner]
    count = points * len(radii)
    turns = [2 * math.pi * i / count - math.pi / 2 for i in range(count)]
    return [
        (radii[i % len(radii)] * math.cos(turn), radii[i % len(radii)] * math.sin(turn))
        for i, turn in enumerate(turns)
    ]


def _cross(arm: float, half_width: float) -> list[tuple[float, float]]:
    a, w = arm, half_width
    return [(-w, -a), (w, -a), (w, -w), (a, -w), (a, w), (w, w), (w, a), (-w, a), (-w, w), (-a, w), (-a, -w), (-w, -w)]


# Corners in units of the radius, y downwards. A circle has no corners.
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "circle": [],
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": _regular(3, 1.2),
    "star": _regular(5, 1.2, inner=0.54),
    "cross": _cross(1.08, 0.37),
}
SHAPES = tuple(OUTLINES)


class Scene(NamedTuple):
    """What a prompt asks for."""

    shape: str
    colour: str
    background: str
    size: str = "medium"

    @property
    def prompt(self) -> str:
        size = "" if self.size == "medium" else f"{self.size} "
        return f"a {size}{self.colour} {self.shape} on a {self.background} background"


class Answer(NamedTuple):
    """What a picture shows; None stands for what cannot be seen with certainty."""

    shape: str | None = None
    colour: str | None = None
    background: str | None = None
    size: str | None = None


PROMPT = re.compile(
    rf"an? (?:(?P<size>{'|'.join(SIZES)}) )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)})"
    rf" on an? (?P<background>{'|'.join(BACKGROUNDS)}) background"
)


def parse_prompt(prompt: str) -> Scene:
    found = PROMPT.fullmatch(" ".join(prompt.lower().split()).rstrip("."))
    if found is None:
        raise ValueError(
            f"The prompt {prompt!r} is not of the form 'a [small|large] COLOUR SHAPE on a BACKGROUND background' with"
            f" a colour of {', '.join(COLOURS)}, a shape of {', '.join(SHAPES)} and a background of"
            f" {', '.join(BACKGROUNDS)}."
        )
    words = found.groupdict()
    return Scene(words["shape"], words["colour"], words["background"], words["size"] or "medium")


@lru_cache(maxsize=1)
def _split() -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """The scenes to train on, and those held out: a held-out shape, colour and background is so in every size."""
    triples = [triple for triple in product(SHAPES, COLOURS, BACKGROUNDS) if triple[1] != triple[2]]
    rng = random.Random(2026)
    rng.shuffle(triples)
    held_out = [Scene(*triple, size) for triple in triples[:HELD_OUT_TRIPLES] for size in SIZES]
    training = [Scene(*triple, size) for triple in triples[HELD_OUT_TRIPLES:] for size in SIZES]
    rng.shuffle(held_out)
    return tuple(training), tuple(held_out)


def training_prompts() -> list[str]:
    return [scene.prompt for scene in _split()[0]]


def held_out_prompts(count: int = 64) -> list[str]:
    """Prompts whose combination of shape, colour and background was never trained on, in no size."""
    held_out = _split()[1]
    if not 0 < count <= len(held_out):
        raise ValueError(f"There are {len(held_out)} held-out prompts, so count must be 1 to {len(held_out)}.")
    return [scene.prompt for scene in held_out[:count]]


def shape_mask(shape: str, side: int, centre: tuple[float, float], radius: float) -> Image.Image:
    """A white shape on black, with smooth edges; centre and radius are in pixels."""
    fine = 4
    (x, y), r = (fine * centre[0], fine * centre[1]), fine * radius
    mask = Image.new("L", (fine * side, fine * side))
    draw = ImageDraw.Draw(mask)
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    else:
        draw.polygon([(x + r * u, y + r * v) for u, v in OUTLINES[shape]], fill=255)
    return mask.reduce(fine)


def draw_picture(scene: Scene, rng: random.Random | None = None, side: int = SIDE) -> Image.Image:
    """A drawing of the scene: in the middle, or with `rng` a little beside it and a little larger or smaller."""
    shift_x, shift_y, scale = (rng.uniform(-1, 1), rng.uniform(-1, 1), rng.uniform(-1, 1)) if rng else (0, 0, 0)
    centre = (side * (0.5 + 0.02 * shift_x), side * (0.5 + 0.02 * shift_y))
    radius = side * SIZES[scene.size] * (1 + 0.02 * scale)
    picture = Image.new("RGB", (side, side), PALETTE[scene.background])
    picture.paste(PALETTE[scene.colour], mask=shape_mask(scene.shape, side, centre, radius))
    return picture


@lru_cache(maxsize=len(SHAPES))
def _unit(shape: str) -> tuple[float, float]:
    """A shape's area and the height of its centre of mass, for radius 1."""
    side, radius = 512, 160
    mask = np.asarray(shape_mask(shape, side, (side / 2, side / 2), radius), np.float64) / 255
    rows = np.arange(side) + 0.5
    height = float((mask.sum(1) * rows).sum() / mask.sum()) - side / 2
    return float(mask.sum()) / radius**2, height / radius


def _name(pixels: np.ndarray, names: tuple[str, ...], share: float = 0.97) -> str | None:
    """The colour that the pixels' median is near to, if nearly all of the pixels are near to it too."""
    distances = {name: np.linalg.norm(np.median(pixels, 0) - PALETTE[name]) for name in names}
    name = min(distances, key=distances.__getitem__)
    near = np.linalg.norm(pixels - PALETTE[name], axis=-1) < 55
    return name if distances[name] < 35 and near.mean() >= share else None


def _core(mask: np.ndarray) -> np.ndarray:
    """The mask less its outermost two pixels, where colours mix."""
    for _ in range(2):
        inner = mask.copy()
        inner[1:] &= mask[:-1]
        inner[:-1] &= mask[1:]
        inner[:, 1:] &= mask[:, :-1]
        inner[:, :-1] &= mask[:, 1:]
        mask = inner
    return mask


def _box(cover: np.ndarray) -> np.ndarray:
    """The first and last row and column that are covered."""
    rows, columns = np.flatnonzero((cover > 0.5).any(1)), np.flatnonzero((cover > 0.5).any(0))
    return np.array([rows[0], rows[-1], columns[0], columns[-1]])


def _fit(cover: np.ndarray) -> tuple[str | None, float]:
    """The shape that covers the picture so, and its radius as a part of the side.

    Each shape is drawn with the same area and centre of mass. One must overlap well, clearly better than the others,
    and reach as far to every side: where a part is cut off, it does not.
    """
    side = len(cover)
    area = float(cover.sum())
    places = np.arange(side) + 0.5
    x, y = float((cover.sum(0) * places).sum()) / area, float((cover.sum(1) * places).sum()) / area
    overlaps, radii, drawings = {}, {}, {}
    for shape in SHAPES:
        unit_area, unit_height = _unit(shape)
        radius = radii[shape] = math.sqrt(area / unit_area)
        drawn = np.asarray(shape_mask(shape, side, (x, y - radius * unit_height), radius), np.float32) / 255
        drawings[shape] = drawn
        overlaps[shape] = float(np.minimum(drawn, cover).sum() / np.maximum(drawn, cover).sum())
    second, best = sorted(overlaps, key=overlaps.__getitem__)[-2:]
    certain = overlaps[best] > 0.76 and overlaps[best] - overlaps[second] > 0.04
    whole = np.abs(_box(drawings[best]) - _box(cover)).max() < max(0.26 * radii[best], 2.5)
    return (best if certain and whole else None), radii[best] / side


def read_picture(image: Image.Image) -> Answer:
    """Reads shape, colour, background and size; whatever is blurred, mixed, cut or noisy is answered with None."""
    if image.width != image.height or image.width < 48:
        raise ValueError(f"A picture to read is square and at least 48 pixels wide, not {image.width}x{image.height}.")
    pixels = np.asarray(image.convert("RGB"), np.float32)
    side = len(pixels)

    frame = np.ones((side, side), bool)
    rim = max(side // 40, 1)
    frame[rim:-rim, rim:-rim] = False
    background = _name(pixels[frame], BACKGROUNDS)
    if background is None:
        return Answer()
    ground = np.median(pixels[frame], 0)

    core = _core(np.linalg.norm(pixels - ground, axis=-1) > 40)
    if core.mean() < 0.005:
        return Answer(background=background)
    colour = _name(pixels[core], COLOURS, share=0.93)
    if colour is None or colour == background:
        return Answer(background=background)

    # Every pixel is background, shape or, on the edge, a mix of the two: anything else is no clean picture.
    step = np.median(pixels[core], 0) - ground
    cover = np.clip((pixels - ground) @ step / (step @ step), 0, 1)
    stray = np.linalg.norm(pixels - ground - cover[..., None] * step, axis=-1) > 45
    mixed = (cover > 0.2) & (cover < 0.8)
    if stray.mean() > 0.01 or mixed.sum() > 0.5 * (cover > 0.5).sum():
        return Answer(background=background)

    shape, radius = _fit(cover)
    if shape is None:
        return Answer(None, colour, background)
    size = min(SIZES, key=lambda name: abs(SIZES[name] - radius))
    return Answer(shape, colour, background, size if abs(radius / SIZES[size] - 1) < 0.15 else None)


def matches(image: Image.Image, prompt: str) -> bool:
    """Whether the picture shows what the prompt asks for: shape, colour, background and size."""
    return read_picture(image) == parse_prompt(prompt)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the pictures that show what their prompt asks for.")
    parser.add_argument("folder", type=Path, help="PNG files, each with a JSON file of the same name beside it")
    folder = parser.parse_args().folder
    pictures = [path for path in sorted(folder.glob("*.png")) if path.with_suffix(".json").exists()]
    if not pictures:
        print(f"There is no PNG with a JSON of the same name in {folder}.", file=sys.stderr)
        return 2
    right = 0
    for path in pictures:
        prompt = json.loads(path.with_suffix(".json").read_text())["prompt"]
        with Image.open(path) as image:
            answer = read_picture(image)
        if answer == parse_prompt(prompt):
            right += 1
        else:
            print(f"{path.name}: asked for {prompt!r}, shows {answer}")
    print(f"{right} of {len(pictures)} pictures right ({100 * right / len(pictures):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
