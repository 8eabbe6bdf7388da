"""How far a step, or a row, is from comparable ones, in robust standard deviations. Arrays only.

A step is compared with the few before it, on the scale of the variation between steps around it. A row is compared with
the other rows of its step, and with those of its source in the steps around: the trend of the run, what the step did to
all rows and what is usual for its source do not count. Medians and median absolute deviations, so that an outlier does
not hide itself.
"""

import warnings

import numpy as np

from threefold.arrays import Float64, Int64

# The standard deviation of a normal distribution in median absolute deviations.
_OF_MAD = 1.4826
# Steps that a step is compared with, and those on each side that give the scale; fewer say nothing.
_BEFORE, _AROUND, _FEWEST = 7, 25, 12
# Rows whose median is a step's trend, and steps on each side of a block that give the scale of rows.
_ROWS, _BLOCK = 8, 25
# Rows around a step that give their own scale.
_NEAR = 24
# Least scale, as a share of the value: smaller differences are no news.
_FLOOR = 0.005


def rises(values: Float64) -> Float64:
    """How far each value is above the median of those before it, [steps]; NaN where too few are before."""
    risen = np.full(len(values), np.nan)
    if len(values) > _BEFORE:
        before = np.lib.stride_tricks.sliding_window_view(values, _BEFORE)[:-1]
        risen[_BEFORE:] = values[_BEFORE:] - _median(before, 1)
    return risen


def scores_of_steps(values: Float64, *, floor: float = _FLOOR) -> Float64:
    """`rises` in units of the usual rise around each, [steps]; 0 if there are too few steps."""
    risen, scores = rises(values), np.zeros(len(values))
    for start in range(0, len(values), _AROUND):
        own = slice(start, min(start + _AROUND, len(values)))
        around = risen[max(0, start - _AROUND) : own.stop + _AROUND]
        around = around[np.isfinite(around)]
        if len(around) < _FEWEST:
            continue
        least = floor * np.abs(values[own])
        spread = _OF_MAD * np.median(np.abs(around - np.median(around)))
        scores[own] = risen[own] / np.maximum(spread, np.maximum(least, 1e-12))
    return np.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0)


def trend(means: Float64) -> Float64:
    """The usual loss of rows by step, [steps]: the median of its rows, or of the steps around if they are few."""
    return _median(_rows_around(means, _ROWS), 1)


def _rows_around(values: Float64, fewest: int) -> Float64:
    """Rows of each step and of as many on each side as it takes to have enough, [steps, rows]; NaN beyond the ends."""
    width = max(1, values.shape[1])
    side = max(0, -(-(-(-fewest // width) - 1) // 2))
    if not side:
        return values
    padded = np.pad(values, ((side, side), (0, 0)), constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * side + 1, axis=0)
    return around.reshape(len(values), -1)


def scores_of_rows(means: Float64, counts: Int64, sources: Int64) -> tuple[Float64, Float64]:
    """(score, what comparable rows have) of each row, [steps, places] both; 0 where nothing is known.

    Args:
        means: loss of a target, NaN for rows that have none.
        counts: targets of each row; of few the mean varies more.
        sources: number of the row's source.
    """
    base = trend(means)[:, None]
    rest = means - base
    # Rows differ more while a model learns fast, as at the beginning, than those of the whole block do.
    here = _OF_MAD * _median(np.abs(_rows_around(rest, _NEAR)), 1)[:, None]
    scores = np.zeros(means.shape)
    like = np.broadcast_to(base, means.shape).copy()
    for start in range(0, len(means), _BLOCK):
        own = slice(start, start + _BLOCK)
        around = slice(max(0, start - _BLOCK), start + 2 * _BLOCK)
        near = rest[around]
        for source in np.unique(sources[own]):
            theirs = near[(sources[around] == source) & np.isfinite(near)]
            if len(theirs) < _FEWEST:
                continue
            offset = np.median(theirs)
            mine = sources[own] == source
            like[own][mine] += offset
            usual = np.median(counts[around][(sources[around] == source) & np.isfinite(near)])
            fewer = np.sqrt(np.maximum(1.0, usual / np.maximum(counts[own], 1)))
            # Rows that are easy are often easier than others are hard: each side has its own scale.
            apart = means[own] - like[own]
            above, below = (
                _OF_MAD * np.median(np.abs(side)) for side in _sides(theirs - offset)
            )
            spread = np.where(apart > 0, above, below) * fewer
            spread = np.fmax(spread, here[own] * fewer)
            scale = np.maximum(spread, np.maximum(_FLOOR * np.abs(like[own]), 1e-12))
            scores[own][mine] = (apart / scale)[mine]
    return np.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0), like


def _sides(values: Float64) -> tuple[Float64, Float64]:
    """The non-negative and the non-positive values, around a median of zero."""
    return values[values >= 0], values[values <= 0]


def _median(values: Float64, axis: int) -> Float64:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nothing but NaN it is NaN
        medians: Float64 = np.nanmedian(values, axis=axis)
    return medians
