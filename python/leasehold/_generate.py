"""Texts that continue prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Union, overload

from leasehold._native import Device, Model

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        tokens: int
        device: Device | str | None
        dtype: str | None
        temperature: float | None
        top_k: int | None
        top_p: float | None
        min_p: float | None
        seed: int
        defaults: bool
        stop_at_eos: bool
        stop: str | Sequence[str]
        batch: int | None


_Model = Union[Model, str, "os.PathLike[str]"]


def _model(model: _Model, device: Device | str | None, dtype: str | None) -> Model:
    if isinstance(model, Model):
        return model
    return Model(model, device=device or "cpu:0", dtype=dtype or "float32")


def _pieces(
    model: _Model, prompts: str | Sequence[str], options: dict[str, Any]
) -> Iterator[tuple[int, str]]:
    model = _model(model, options.pop("device"), options.pop("dtype"))
    if isinstance(options["stop"], str):
        options["stop"] = [options["stop"]]
    return model._pieces([prompts] if isinstance(prompts, str) else prompts, **options)


# A text is a sequence of texts too, but is taken as one.
@overload
def generate(  # type: ignore[overload-overlap]
    model: _Model, prompts: str, **options: Unpack[_Options]
) -> str: ...
@overload
def generate(
    model: _Model, prompts: Sequence[str], **options: Unpack[_Options]
) -> list[str]: ...
def generate(
    model: _Model,
    prompts: str | Sequence[str],
    *,
    tokens: int = 64,
    device: Device | str | None = None,
    dtype: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    defaults: bool = False,
    stop_at_eos: bool = True,
    stop: str | Sequence[str] = (),
    batch: int | None = None,
) -> str | list[str]:
    """Continues prompts. Several are decoded together: each step reads the weights once for all.

    Parameters
    ----------
    model
        A directory of Hugging Face's, or a `Model`, which is loaded once for several calls.
    prompts
        A text, or a list of texts.
    tokens
        New tokens of each text, at most.
    device, dtype
        As for `Model`, if a directory is given.
    temperature
        The divisor of the logits; 0, the default, selects the largest.
    top_k
        The number of largest logits that are candidates; 0, the default, for all.
    top_p
        Leaves the fewest most probable candidates whose probabilities reach this sum.
    min_p
        Leaves the candidates with this part of the largest probability.
    seed
        Of the random numbers. Each text of a list has a seed of its own, made from this one and its
        number. So one prompt several times gives several texts. The first is that of the seed
        alone, and the same arguments give the same texts.
    defaults
        Chooses tokens as the model's `generation_config.json` says: sampling, `repetition_penalty`,
        `suppress_tokens` and `begin_suppress_tokens`. What is given precedes it. Other settings
        that would change the text are refused.
    stop_at_eos
        Ends a text at the model's end tokens.
    stop
        A text, or several, that end the text before them.
    batch
        Prompts that are decoded together, at most; 16 by default.

    Returns
    -------
    The new text, without the prompt; for a list of prompts a list.

    Raises
    ------
    InvalidArgumentError
        For a prompt that is empty, or too long for the model's context together with `tokens`; its
        number is named. Nothing was computed then.
    """
    options = dict(locals())
    del options["model"], options["prompts"]
    # `list` believes what a sequence says of its length.
    given = prompts if isinstance(prompts, str) else [prompt for prompt in prompts]
    texts = [""] if isinstance(given, str) else [""] * len(given)
    for at, piece in _pieces(model, given, options):
        texts[at] += piece
    return texts[0] if isinstance(prompts, str) else texts


@overload
def stream_text(  # type: ignore[overload-overlap]
    model: _Model, prompts: str, **options: Unpack[_Options]
) -> Iterator[str]: ...
@overload
def stream_text(
    model: _Model, prompts: Sequence[str], **options: Unpack[_Options]
) -> Iterator[tuple[int, str]]: ...
def stream_text(
    model: _Model, prompts: str | Sequence[str], **options: Any
) -> Iterator[str] | Iterator[tuple[int, str]]:
    """As `generate`, but gives the pieces of the text as they come.

    For a list of prompts each piece is a pair: the number of its prompt, and the text. The options
    are those of `generate`. The prompts are checked at once, not with the first piece.
    """
    known = dict(generate.__kwdefaults__ or {})
    unknown = options.keys() - known.keys()
    if unknown:
        raise TypeError(f"stream_text has no option {', '.join(sorted(unknown))}")
    pieces = _pieces(model, prompts, {**known, **options})
    return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces
