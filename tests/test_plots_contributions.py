"""The picture of contributions shows what the result holds, and keeps its signs in grey."""

import numpy as np
import pytest
import torch

from etdyn import descend
from etdyn.analysis.contributions import contributions
from etdyn.plots_contributions import CHANGES, contribution_rows


@pytest.fixture(scope="module")
def result(make_case):
    case = make_case(dynamics="leaky", tokens=4)
    images = torch.nn.Unflatten(1, (1, 4, 8))
    sol = descend(case.system, case.x, 0.1, 3)
    return contributions(sol, lambda x: images(case.system.activation(x).flatten(1)), steps=[0, 2])


def shown(figure):
    """The arrays of images in the order of the axes, rows first."""
    return [ax.images[0] for ax in figure.axes if ax.images]


def test_a_row_for_every_step_with_state_and_parts_of_every_sample(result):
    figure = contribution_rows(result)
    drawn = shown(figure)
    assert len(drawn) == 2 * 2 * (1 + 3)  # steps, samples, state and attention, hopfield, leak
    for index, image in enumerate(drawn):
        step, rest = divmod(index, 8)
        sample, column = divmod(rest, 4)
        here = result.isel(step=step, sample=sample, channel=0)
        if column == 0:
            np.testing.assert_array_equal(image.get_array(), np.clip(here.state, 0, 1))
        else:
            np.testing.assert_array_equal(
                image.get_array(), here.contribution.isel(part=column - 1)
            )
            low, high = image.get_clim()
            of_row = result.contribution.isel(step=step, part=slice(3))
            assert -low == high == float(abs(of_row).max())
    labels = [ax.get_ylabel() for ax in figure.axes if ax.get_ylabel()]
    assert set(labels) == {"step 1\nt = 0", "step 3\nt = 0.2", "pixel change"}


def test_images_given_and_true_stand_above(result):
    images = {name: np.full((2, 1, 4, 8), value) for name, value in (("given", 0.2), ("true", 1))}
    images["given"][:, :, 0] = np.nan
    figure = contribution_rows(result, images)
    above = shown(figure)[:4]
    titles = [ax.get_title() for ax in figure.axes[:9] if ax.get_title()]
    assert titles == ["given", "true"] * 2
    assert above[0].get_array().mask[0].all() and (above[1].get_array() == 1).all()
    figure.canvas.draw()


def test_changes_grow_brighter_from_minus_to_plus():
    colours = CHANGES(np.linspace(0, 1, 101))[:, :3]
    brightness = colours @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(brightness) > 0).all()


def test_wrong_input(result):
    with pytest.raises(ValueError, match="result: expected decoded states that are images"):
        contribution_rows(result.isel(channel=0))
    too_many = dict.fromkeys("abcde", np.zeros((2, 1, 4, 8)))
    with pytest.raises(ValueError, match="images: expected at most 4, got 5"):
        contribution_rows(result, too_many)
