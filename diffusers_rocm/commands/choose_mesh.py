"""A mesh for a user who names none."""


def choose_mesh(world: int, guides: bool, heads: int | None = None) -> dict[str, int]:
    """The axes of `world` ranks: `cfg` for the branches of guidance where the number is even, Ulysses for the rest.

    Where there are fewer heads than that, Ulysses takes as many ranks as it can, and a ring what is left.

    A rule of thumb (docs/performance.md, "What to choose"), which knows neither the model's size nor the links.

    Args:
        guides: whether each step has two forwards.
        heads: of the model's attention; None where that is not known.

    Returns:
        axis -> degree, of those above 1.
    """
    cfg = 2 if guides and world % 2 == 0 else 1
    share = world // cfg
    ulysses = max(each for each in range(1, min(share, heads or share) + 1) if share % each == 0)
    chosen = {"cfg": cfg, "ring": share // ulysses, "ulysses": ulysses}
    return {name: degree for name, degree in chosen.items() if degree > 1}
