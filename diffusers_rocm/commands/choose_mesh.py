"""A mesh for a user who names none."""


def choose_mesh(world: int, guides: bool) -> dict[str, int]:
    """The axes of `world` ranks: `cfg` for the branches of guidance where the number is even, Ulysses for the rest.

    A rule of thumb (docs/performance.md, "What to choose"), which knows neither the model's size nor the links.

    Args:
        guides: whether each step has two forwards.

    Returns:
        axis -> degree, of those above 1.
    """
    cfg = 2 if guides and world % 2 == 0 else 1
    return {name: degree for name, degree in (("cfg", cfg), ("ulysses", world // cfg)) if degree > 1}
