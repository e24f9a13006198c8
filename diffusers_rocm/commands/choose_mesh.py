"""A mesh for a user who names none."""

import math


# Of a GPU's memory, what weights may take; the rest is for activations and the VAE.
ROOM = 0.75


def choose_mesh(
    world: int, guides: bool, heads: int | None = None, weights: float = 0, memory: float = math.inf
) -> dict[str, int]:
    """The axes of `world` ranks: `cfg` for the branches of guidance where the number is even, Ulysses for the rest.

    Where the weights do not fit, `tp` comes first, with as few ranks as they fit on. Where there are fewer heads than
    ranks, Ulysses takes as many ranks as it can, and a ring what is left.

    A rule of thumb (docs/performance.md, "What to choose"), which does not know the links.

    Args:
        guides: whether each step has two forwards.
        heads: of the model's attention; None where that is not known, and nothing can be split by them.
        weights: bytes of the denoiser's.
        memory: bytes of the smallest GPU.

    Returns:
        axis -> degree, of those above 1.
    """
    for cfg in (2, 1) if guides and world % 2 == 0 else (1,):
        share = world // cfg
        divisors = [each for each in range(1, min(share, heads or share) + 1) if share % each == 0]
        tp = next((each for each in divisors[: None if heads else 1] if weights / each <= ROOM * memory), None)
        if tp is not None:
            break
    else:  # as small as it gets
        tp = divisors[-1] if heads else 1
    ulysses = max(each for each in divisors if share // tp % each == 0 and each * tp <= (heads or share))
    chosen = {"cfg": cfg, "ring": share // tp // ulysses, "ulysses": ulysses, "tp": tp}
    return {name: degree for name, degree in chosen.items() if degree > 1}
