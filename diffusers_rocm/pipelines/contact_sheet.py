"""Many pictures on one sheet, each with its prompt below."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], path: Path) -> None:
    """Write a PNG of all pictures, at most four in a row, enlarged to be seen where they are tiny."""
    font = ImageFont.load_default(size=14)
    scale = max(1, 192 // max(image.width for image in images))
    width = max(image.width for image in images) * scale
    height = max(image.height for image in images) * scale
    margin, line = 12, 18
    wrapped = [textwrap.wrap(caption, max(10, width // 8)) for caption in captions]
    cell = (width + margin, height + margin + line * max(map(len, wrapped)))
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * cell[0] + margin, rows * cell[1] + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (image, lines) in enumerate(zip(images, wrapped, strict=True)):
        x, y = margin + index % columns * cell[0], margin + index // columns * cell[1]
        sheet.paste(image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST), (x, y))
        draw.multiline_text((x, y + height + 2), "\n".join(lines), fill="black", font=font)
    sheet.save(path)
