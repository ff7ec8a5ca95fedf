# extra: reports
"""Axes of plots: round numbers that cover the data."""

import math
import random
import re

import pytest

from scripts.lib.svg import Series, choose_ticks, draw_line_plot

AXES = [  # the smallest and the largest value, and the texts of the axis
    ((0.55, 2.35), "0.5 1.0 1.5 2.0 2.5"),
    ((1.44, 2.35), "1.4 1.6 1.8 2.0 2.2 2.4"),
    ((0, 1), "0.0 0.2 0.4 0.6 0.8 1.0"),
    ((0, 240), "0 50 100 150 200 250"),
    ((-3, 4), "-3 -2 -1 0 1 2 3 4"),
    ((0.3, 0.3), "0.15 0.20 0.25 0.30 0.35 0.40 0.45"),
    ((0, 0), "-0.6 -0.4 -0.2 0.0 0.2 0.4 0.6"),
    ((12_345, 99_999), "0 20,000 40,000 60,000 80,000 100,000"),
    ((1e-9, 2e-9), "1e-09 1.2e-09 1.4e-09 1.6e-09 1.8e-09 2e-09"),
]


@pytest.mark.parametrize(("values", "expected"), AXES)
def test_an_axis_has_round_numbers(values, expected):
    assert " ".join(text for _, text in choose_ticks(*values)) == expected


def test_an_axis_covers_any_values_in_steps_of_one_two_or_five_times_a_power_of_ten():
    generator = random.Random(7)
    for _ in range(2000):
        low = generator.uniform(-1, 1) * 10.0 ** generator.randint(-6, 6)
        high = low + generator.random() * max(abs(low) * 1e-3, 10.0 ** generator.randint(-6, 6))
        ticks = [value for value, _ in choose_ticks(low, high)]
        step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
        slack = 1e-6 * step  # of rounding
        assert 3 <= len(ticks) <= 10 and ticks[0] <= low + slack and high - slack <= ticks[-1], (low, high, ticks)
        mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(mantissa - nice) for nice in (1, 2, 5)) < 1e-3, (low, high, ticks)


def test_a_plot_shows_these_numbers_on_both_axes():
    losses = Series("loss", [(0, 2.3525), (70, 1.8931), (140, 1.4366), (210, None), (240, 0.5561)])
    texts = re.findall(r">([^<>]+)</text>", draw_line_plot([losses], x_label="step", y_label="loss"))
    assert texts == ["step", "loss", *"0.5 1.0 1.5 2.0 2.5".split(), *"0 50 100 150 200".split(), "loss"]
