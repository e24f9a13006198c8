"""What a context-parallel plan is: data that says where a model's sequences are split and gathered."""

from collections.abc import Mapping
from dataclasses import dataclass

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput


class LeadingTokens:
    """An argument that counts the main stream's first tokens, which the model treats apart.

    A block that takes any arguments and does not name it has no use for it.
    """


# What diffusers' `_cp_plan` maps a module's path to, and counts.
ModulePlan = Mapping[str | int, ContextParallelInput | LeadingTokens] | ContextParallelOutput


@dataclass(frozen=True)
class ContextParallelPlan:
    """Where the sequences of a model class are split and gathered.

    Attributes:
        modules: as diffusers' `_cp_plan`: module path (`*` for one component) -> how its arguments, its outputs
            (`split_output`) or both are split, or how its output is gathered. A dim of one element is left alone, and
            so is a tensor with fewer dims than expected. A list of tensors is split item by item. Hooks run in the
            order of the rules.
        streams: the arguments that are sequences of tokens, in the order in which attention joins them; attention is
            over all of them, or over `main` alone.
        main: the stream that becomes the output, and is gathered.
        whole: paths of attention modules that see no split sequence among their keys (the text alone, or
            cross-attention): they are left alone.
        ordered: whether the order of `streams` is known.
    """

    modules: Mapping[str, ModulePlan]
    streams: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    main: str = "hidden_states"
    whole: tuple[str, ...] = ()
    ordered: bool = True


def split(dim: int, dims: int, output: bool = False) -> ContextParallelInput:
    """Split a tensor of `dims` dims along `dim`."""
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


def gather(dim: int = 1, dims: int = 3) -> ContextParallelOutput:
    """Gather an output of `dims` dims along `dim`."""
    return ContextParallelOutput(gather_dim=dim, expected_dims=dims)
