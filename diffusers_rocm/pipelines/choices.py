"""What a parallel pipeline can be asked for by a word."""

CHOICES = {
    "rank_check": ("first", "always", "off"),
    "vae": ("replicate", "first-rank", "tile"),
    "text_encoders": ("auto", "shard", "first-rank", "replicate"),
    "offload": ("auto", "none", "model", "group", "disk"),
}


def check_choices(**given: str) -> None:
    """Raises ValueError where an argument is none of its words."""
    for name, word in given.items():
        if word not in CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}; got {word!r}")
