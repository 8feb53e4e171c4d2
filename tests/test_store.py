"""Results on disk come back as they were."""

import warnings

import numpy as np
import torch
import xarray as xr

from etdyn import store


def test_text_comes_back_as_it_was_and_zarr_has_nothing_to_warn_of(tmp_path):
    attributes = store.provenance("etdyn.test/1", {"none": None}, torch.zeros(1))
    data = xr.Dataset(
        {"note": (("solver", "k"), [["a", "bcd"], ["", "é"]]), "x": ("solver", [1.0, np.nan])},
        {"solver": ("solver", ["dopri5", "rk4"], {"long_name": "method"})},
        attributes,
    )
    tree = xr.DataTree.from_dict({"/": data, "/inner": data})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k, result in enumerate((data, tree)):
            store.save(result, tmp_path / str(k))
            xr.testing.assert_identical(store.load(tmp_path / str(k)), result)
    assert data["solver"].encoding == {}, "saving leaves the result alone"
    assert data["solver"].dtype.kind == "U"
