"""`lapis.report`: gathers the sections that can be made from what is given, and writes the page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lapis.errors import DataError
from lapis.files import check_writable, write_text
from lapis.options import check_arguments
from lapis.posteriors import Posterior
from lapis.reports import examples, fit, quality
from lapis.reports.content import Section
from lapis.reports.judged import judged
from lapis.reports.page import html, plotly_library

MOST = 8
"""Posteriors that one page compares."""


def report(
    posterior: Posterior | Mapping[str, Posterior],
    path: str | os.PathLike[str],
    *,
    data: Any = None,
    test: Any = None,
    out_of_distribution: Any = None,
    title: str = "Lapis report",
    classes: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    image_shape: tuple[int, ...] | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Write one self-contained HTML page about a posterior, or about several of the same data.

    It is readable offline, in light and dark, with plots to hover over and zoom into. What can be said depends on what
    is given: without data the fit alone (prior, evidence, effective parameters by layer), with `test` data the scores,
    calibration, intervals and the least certain examples, with `out_of_distribution` inputs whether these are told.

    Args:
        posterior: the posterior, or several by name: the first one has all sections, the others are compared with it.
        path: the file to write; needs the extra `report` (plotly, whose library of 5 MB the page holds).
        data: the training data, in any form that `lapis.laplace` takes.
        test: new examples with targets; without them the training data are judged, and the page says so.
        out_of_distribution: inputs unlike the training data, in any form that `predict` takes.
        title: of the page.
        classes: names of the classes.
        notes: sentences to show below the summary.
        image_shape: (H, W) or (C, H, W) of inputs that are flattened images.
        batch_size: for data that are not batched yet.
        progress: show a bar; by default on a terminal only.

    Returns:
        The path of the page.
    """
    check_arguments(report, locals(), apart=("posterior",))
    posteriors = _checked(posterior)
    library = plotly_library()
    check_writable(path)
    first = next(iter(posteriors.values()))
    names = None if classes is None else list(classes)
    sections = [fit.summary(posteriors, notes)]
    shown, on = (data, "training") if test is None else (test, "test")
    if shown is not None:
        sections += _judged(posteriors, shown, on, out_of_distribution, names, image_shape, batch_size, progress)
    elif out_of_distribution is not None:
        raise DataError(
            "Examples out of distribution are compared with others",
            expected="test or data beside out_of_distribution",
            got="neither",
            do="pass test data",
        )
    made = [fit.climb(posteriors), fit.layers(posteriors), fit.data_and_model(first, data, batch_size, names)]
    sections += [section for section in made if section is not None]
    about = "; ".join(f"{name}: {repr(each).strip('<>')}" for name, each in posteriors.items())
    write_text(path, html(title, about, sections, library))
    return Path(path)


def _checked(posterior: Any) -> dict[str, Posterior]:
    found = dict(posterior) if isinstance(posterior, Mapping) else {"posterior": posterior}
    fits = 0 < len(found) <= MOST and all(
        isinstance(name, str) and isinstance(each, Posterior) for name, each in found.items()
    )
    if not fits:
        raise DataError(
            "A report is about posteriors",
            expected=f"a posterior, or a dictionary of one to {MOST} by name",
            got=type(posterior).__name__ + (f" of {len(found)}" if isinstance(posterior, Mapping) else ""),
            do='pass {"name": posterior}',
        )
    return found


def _judged(
    posteriors: Mapping[str, Posterior],
    data: Any,
    on: str,
    unlike: Any,
    classes: list[str] | None,
    image_shape: tuple[int, ...] | None,
    batch_size: int | None,
    progress: bool | None,
) -> list[Section]:
    """Sections that need examples with targets."""
    first = next(iter(posteriors.values()))
    results = {name: judged(each, data, batch_size, progress) for name, each in posteriors.items()}
    own = next(iter(results.values()))
    evidences = {}
    if len(posteriors) > 1:
        found = {name: each._evidence_of_data() for name, each in posteriors.items()}
        evidences = {name: float(each.value.detach()) for name, each in found.items() if each is not None}
    notes = first.diagnose(data, batch_size=batch_size, progress=progress).findings
    if on == "training":
        notes = [
            "These are training data: on new data the scores will be worse. Pass test data for a fair picture.",
            *notes,
        ]
    sections = [
        quality.scores(results, evidences, on, notes),
        quality.calibration(results),
        examples.bands(first, own, on) if own.points else None,
        None if unlike is None else quality.outside(first, own, unlike, on, progress),
        examples.least_sure(own, on, classes, image_shape),
    ]
    return [section for section in sections if section is not None]
